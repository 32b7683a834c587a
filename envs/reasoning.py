"""The problems of k3rl/Reason-v0: which datasets of reasoning-gym it has, and how they are scored.

A dataset belongs when all of this holds of it: its entries carry an answer that its own scorer
gives the full score; an entry is the same in any process; no answer to another entry, nor an empty
or a meaningless one, gets the full score; and scoring a text of the policy's runs none of it.
`EXCLUDED` says which part each other dataset fails. reasoning_gym (arXiv 2505.24760) is imported
when the first entry is made; that takes about a second.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from k3rl.errors import UserInputError
from k3rl.types import JsonObject

_NAMES: dict[str, str] = {
    "algebra": "polynomial_equations simple_equations",
    "algorithmic": (
        "base_conversion binary_alternation binary_matrix caesar_cipher count_primes "
        "cryptarithm game_of_life group_anagrams jugs letter_counting letter_jumble "
        "manipulate_matrix number_filtering palindrome_generation "
        "palindrome_partitioning pool_matrix rotate_matrix rotten_oranges sentence_reordering "
        "spell_backward spiral_matrix string_insertion string_manipulation string_splitting "
        "string_synthesis word_sequence_reversal word_sorting"
    ),
    "arc": "arc_1d arc_agi rearc",
    "arithmetic": (
        "basic_arithmetic bitwise_arithmetic calendar_arithmetic chain_sum count_bits "
        "decimal_arithmetic decimal_chain_sum dice fraction_simplification gcd gsm_symbolic "
        "lcm leg_counting number_format power_function prime_factorization products "
        "time_intervals"
    ),
    "code": "bf",
    "cognition": (
        "color_cube_rotation figlet_font modulo_grid needle_haystack number_sequence "
        "rectangle_count"
    ),
    "games": (
        "countdown emoji_mystery futoshiki kakurasu mahjong_puzzle maze mini_sudoku n_queens "
        "sokoban sudoku survo tower_of_hanoi tsumego"
    ),
    "geometry": "advanced_geometry simple_geometry",
    "graphs": (
        "course_schedule family_relationships largest_island path_star quantum_lock shortest_path"
    ),
    "induction": "acre",
    "logic": "aiw circuit_logic knights_knaves self_reference syllogism zebra_puzzles",
}
"""By reasoning-gym's own categories."""
CATEGORIES = {category: tuple(names.split()) for category, names in _NAMES.items()}
ALL = tuple(sorted(name for names in CATEGORIES.values() for name in names))
TERSE = ("chain_sum", "basic_arithmetic")
"""Those that the preset `arithmetic` asks in one expression, `12+7-3=?`."""

NO_ANSWER = "its entries carry no answer"
UNSTABLE = "its entries differ from process to process"
GUESSED = "some answer gets the full score on other entries too: "
RUNS_TEXT = "its scorer evaluates the answer, in no form that can be checked before"
EXCLUDED = {
    "boxnet": NO_ANSWER,
    "graph_color": NO_ANSWER,
    "propositional_logic": NO_ANSWER,
    "rubiks_cube": NO_ANSWER,
    "rush_hour": NO_ANSWER,
    "ab": "its right answer can be empty",
    "codeio": UNSTABLE,
    "isomorphic_strings": UNSTABLE,
    "knight_swap": UNSTABLE,
    "list_functions": UNSTABLE,
    "polynomial_multiplication": UNSTABLE,
    "ransom_note": UNSTABLE,
    "word_ladder": UNSTABLE,
    "number_sorting": "its scorer takes numbers near the right ones, and NaN for any",
    "coin_flip": GUESSED + "0",
    "complex_arithmetic": GUESSED + "nan",
    "game_of_life_halting": GUESSED + "any text",
    "puzzle24": GUESSED + "6+6+6+6",
    "intermediate_integration": RUNS_TEXT,
    "simple_integration": RUNS_TEXT,
    "composite": "it only mixes other datasets",
}

MADE_PER_ENTRY = frozenset({"acre", "gsm_symbolic"})
"""They prepare as many entries as they are told to hold; the others make any entry when asked."""
DATASET_SEED = 0
"""reasoning-gym draws entry i from `Random(seed + i)`: one fixed seed, or entries would repeat."""
NUM_ENTRIES = 1 << 31
"""Of each dataset; larger numbers are no seeds of NumPy's, which pool_matrix uses."""

_EVALUATED = {
    "binary_matrix": r"[\d\s]+",
    "countdown": r"(?!.*(\*\s*\*|/\s*/|\d{7}))[\d\s()+*/-]{1,200}",
    "n_queens": r"[Q_\s]+",
    "spiral_matrix": r"[\d\s-]+",
    "string_insertion": r"[A-E]+",
}
"""Their scorers evaluate an answer as Python; what is not of this form never gets there."""
_HUGE = re.compile(r"[eE][+-]?\d{3}")
"""A number whose exact value alone would fill the memory."""
_NOT_FINITE = re.compile(r"(?<![a-z])[+-]?(nan|inf|infinity)(?![a-z])", re.IGNORECASE)
"""What no comparison of numbers calls wrong."""


@cache
def _dataset(name: str, max_terms: int | None, max_digits: int | None) -> Any:
    import reasoning_gym

    settings: dict[str, Any] = {}
    if max_terms is not None:
        settings = {"max_terms": max_terms, "max_digits": max_digits, "min_terms": 2}
        settings["min_digits"] = 1
        if name == "basic_arithmetic":
            settings |= {"operators": ["+", "-", "*"], "allow_negation": False}
    return reasoning_gym.create_dataset(name, seed=DATASET_SEED, size=1, **settings)


@lru_cache(4096)
def _drawn(
    name: str, max_terms: int | None, max_digits: int | None, seed: int
) -> tuple[Any, dict[str, Any]]:
    """A task asks for its own entry again and again: drawn, shown, answered and scored."""
    if name in MADE_PER_ENTRY:
        import reasoning_gym

        dataset = reasoning_gym.create_dataset(name, seed=seed % NUM_ENTRIES, size=1)
        return dataset, dataset[0]
    dataset = _dataset(name, max_terms, max_digits)
    return dataset, dataset[seed if max_terms is not None else seed % NUM_ENTRIES]


def find_entry(seed: int, metadata: JsonObject) -> tuple[Any, dict[str, Any]]:
    """The dataset that scores a task, and the task's entry in it.

    `metadata` names the dataset and, when the task is terse, `max_terms` and `max_digits`. Raises
    UserInputError for metadata that no task has.
    """
    name = metadata.get("dataset")
    max_terms, max_digits = metadata.get("max_terms"), metadata.get("max_digits")
    is_terse = isinstance(max_terms, int) and isinstance(max_digits, int) and name in TERSE
    if not is_terse and (name not in ALL or (max_terms, max_digits) != (None, None)):
        raise UserInputError(f"k3rl/Reason-v0: no problem has {metadata}")
    return _drawn(str(name), max_terms, max_digits, seed)


def expression_of(entry: dict[str, Any]) -> str:
    """The arithmetic expression of an entry of a `TERSE` dataset, without spaces."""
    return str(entry["metadata"]["expression"]).replace(" ", "")


def content_of(seed: int, metadata: JsonObject) -> str:
    """What makes two tasks the same problem: the expression, or else the question's text."""
    _, entry = find_entry(seed, metadata)
    if metadata["dataset"] in TERSE:
        return expression_of(entry)
    return str(entry["question"])


def is_full_score(seed: int, metadata: JsonObject, answer: str) -> bool:
    """Whether the dataset gives `answer` its full score; it gives parts of a point for near misses.

    Scorers are made for answers of a fair shape. Others are wrong without being tried: very long
    ones, numbers too large to compute with, and what would be run as code. So is an answer that
    makes the scorer fail.
    """
    dataset, entry = find_entry(seed, metadata)
    answer, right = answer.strip(), str(entry["answer"]).strip()
    if answer == right:
        return bool(answer)
    if not answer or len(answer) > 64 + 4 * len(right) or _HUGE.search(answer):
        return False
    if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(right):
        return False
    form = _EVALUATED.get(str(metadata["dataset"]))
    if form is not None and re.fullmatch(form, answer, re.DOTALL) is None:
        return False
    try:
        return bool(dataset.score_answer(answer, entry) == 1.0)
    except Exception:
        return False
