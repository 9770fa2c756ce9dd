"""One row of each public schema, with all of its columns."""

from __future__ import annotations

FLASHRAG = {
    "id": "test_0",
    "question": "who wrote it?",
    "golden_answers": ["Ann", "Ann Lee"],
    "metadata": {"type": "bridge"},
}

SEARCH_R1 = {
    "id": "train_0",
    "question": "who wrote it?",
    "golden_answers": ["Ann"],
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": "Answer the given question. who wrote it?"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann Lee"]}},
    "extra_info": {"index": 0, "split": "train"},
    "metadata": None,
}

MEDQA = {
    "question": "Which drug?",
    "answer": "Vitamin C",
    "options": {"A": "Aspirin", "B": "Biotin", "C": "Vitamin C", "D": "Dopamine"},
    "meta_info": "step1",
    "answer_idx": "C",
    "metamap_phrases": ["drug", "which"],
}

MEDMCQA = {
    "id": "00000000-0000-4000-8000-000000000001",
    "question": "How many?",
    "opa": "one",
    "opb": "two",
    "opc": "three",
    "opd": "four",
    "cop": 1,
    "choice_type": "single",
    "exp": "because",
    "subject_name": "Anatomy",
    "topic_name": None,
}

PUBMEDQA = {
    "pubid": 21645374,
    "question": "Do mitochondria matter?",
    "context": {
        "contexts": ["Cells die, programmed."],
        "labels": ["BACKGROUND"],
        "meshes": ["Mitochondria"],
        "reasoning_required_pred": ["y", "e", "s"],
        "reasoning_free_pred": ["y", "e", "s"],
    },
    "long_answer": "It seems so.",
    "final_decision": "yes",
}
