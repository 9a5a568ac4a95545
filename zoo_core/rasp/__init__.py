"""RASP: a language for what attention can compute, as a small library over tensors.

    from zoo_core import rasp
    words = rasp.Words.of([[1, 4, 2, 4], [1, 3]])
    same = words.select(words.tokens, words.tokens, operator.eq)
    rasp.selector_width(same)                       # how often each token occurs
    rasp.learn("sort", "linformer", guided=True)    # train a small BERT, heads supervised

Weiss, Goldberg, Yahav, "Thinking Like Transformers", 2021, arXiv:2106.06981.
"""

from __future__ import annotations

from zoo_core.rasp.guidance import Guide
from zoo_core.rasp.learning import Lesson, Outcome, Score, examine, learn, learner
from zoo_core.rasp.programs import Trace
from zoo_core.rasp.selectors import Selector, aggregate, select, selector_width
from zoo_core.rasp.tasks import TASKS, Sample, Task, find
from zoo_core.rasp.words import Words

__all__ = [
    "TASKS",
    "Guide",
    "Lesson",
    "Outcome",
    "Sample",
    "Score",
    "Selector",
    "Task",
    "Trace",
    "Words",
    "aggregate",
    "examine",
    "find",
    "learn",
    "learner",
    "select",
    "selector_width",
]
