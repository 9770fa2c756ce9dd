# An excerpt of trl 1.16.0, trl.generation.vllm_client: copyright The HuggingFace Team, licensed
# under the Apache License, Version 2.0. Changed: no comments, no docstrings, another layout.

def generate(
    self,
    prompts: list[str] | list[list[int]],
    features: list[dict | None] | None = None,
    n: int = 1,
    repetition_penalty: float = 1.0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_tokens: int = 16,
    logprobs: int | None = 0,
    structured_outputs_regex: str | None = None,
    generation_kwargs: dict | None = None,
) -> dict[str, list[list[int]]]:
    sampling_params = {
        "n": n,
        "repetition_penalty": repetition_penalty,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
    }
    if structured_outputs_regex is not None:
        sampling_params["structured_outputs"] = {"regex": structured_outputs_regex}
    sampling_params.update(generation_kwargs or {})
    if features is not None:
        return self._generate_from_features(prompts, features, sampling_params)
    payload = {
        "model": self.model,
        "prompt": prompts,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **sampling_params,
    }
    choices = self._post(f"{self.base_url}/v1/completions", json=payload)["choices"]
    prompt_ids = [choice["prompt_token_ids"] for choice in choices[::n]]
    completion_ids = [choice["token_ids"] for choice in choices]
    logprobs, logprob_token_ids = parse_logprobs([choice["logprobs"] for choice in choices])
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "logprob_token_ids": logprob_token_ids,
    }
