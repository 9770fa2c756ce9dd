"""What the model cards of these trainers cite."""

from __future__ import annotations

import textwrap

SORL_PAPER = {
    "title": "Stabilizing Off-Policy Training for Long-Horizon LLM Agent via Turn-Level Importance Sampling and "
    "Clipping-Triggered Normalization",
    "id": "2511.20718",
    "citation": textwrap.dedent("""\
        @article{li2025sorl,
            title   = {{Stabilizing Off-Policy Training for Long-Horizon LLM Agent via Turn-Level Importance Sampling and Clipping-Triggered Normalization}},
            author  = {Chenliang Li and Adel Elmahdy and others},
            year    = 2025,
            eprint  = {arXiv:2511.20718},
        }"""),  # noqa: E501
}
"""For the model card that TRL writes beside each checkpoint."""
