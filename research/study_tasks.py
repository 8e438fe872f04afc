"""The generated tasks of the study: problems, solutions, rewards and demonstrations.

A task maps a random generator to problems. All prompts of a task have the same length, so nothing
is padded. A character is a token. A reward is 1 for a correct response and 0 otherwise. Correct
demonstrations come in two styles, which the reward treats alike: the base model was trained on the
first style; the second writes a fifth of the characters differently.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gac.data import Example
from gac.rollouts import Rollout

DIGITS, LETTERS = "0123456789", "abcdefghij"
MARKS, MOVES = ".'", "URDL"
CELLS = "klmnopqrstuvwxyz"  # a 4 by 4 grid
STYLES = str.maketrans("05afU", "OFAB^")
"""The second style of some characters of responses; the others are the same in both styles."""
PLAIN = {new: chr(old) for old, new in STYLES.items()}
ALPHABET = DIGITS + LETTERS + MARKS + MOVES + CELLS + "OFAB^" + "+-=#"


class Problem(NamedTuple):
    """A prompt and a correct response."""

    prompt: str
    solution: str
    table: str = ""
    """What only the environment knows."""


class Task(NamedTuple):
    """A kind of problem."""

    problem: Callable[[random.Random], Problem]
    """A random problem."""
    correct: Callable[[str, Problem], bool]
    """Whether a response solves the problem."""
    response_tokens: int
    """Length of the longest response, without the end token."""
    turns: bool = False
    """Whether a response has two turns of the policy, with the environment's reply in between."""


def _is_solution(response: str, problem: Problem) -> bool:
    return response == problem.solution


def arithmetic(rng: random.Random) -> Problem:
    """Sum or difference modulo 125 of two numbers of three digits in base 5, units first.

    The response has a digit and a carry mark for each column: 013+124 is written as "+342110=".
    """
    op, a, b = rng.choice("+-"), rng.randrange(125), rng.randrange(125)
    out, columns, carry = "", "", 0
    for power in (1, 5, 25):
        x, y = a // power % 5, b // power % 5
        value = x + y + carry if op == "+" else x - y - carry
        carry = int(not 0 <= value <= 4)
        out += f"{value % 5}{MARKS[carry]}"
        columns += f"{x}{y}"
    return Problem(f"{op}{columns}=", out)


def strings(rng: random.Random) -> Problem:
    """Four letters, reversed (-), in two swapped halves (#) or each replaced by the next (+)."""
    op, text = rng.choice("-#+"), "".join(rng.choices(LETTERS, k=4))
    shifted = "".join(LETTERS[(LETTERS.index(c) + 1) % 10] for c in text)
    return Problem(f"{op}{text}=", {"-": text[::-1], "#": text[2:] + text[:2], "+": shifted}[op])


def sorting(rng: random.Random) -> Problem:
    """Six digits in ascending order."""
    digits = rng.choices(DIGITS, k=6)
    return Problem("".join(digits) + "=", "".join(sorted(digits)))


def lookup(rng: random.Random) -> Problem:
    """Two look-ups in a table of eight values, then the larger of both values.

    The prompt has the values of the keys a to h and two keys. The response names a key and its
    value, twice, and the answer: a tool task with two calls whose results the policy has to copy
    from the prompt, so that it fits into a single turn.
    """
    values, keys = rng.choices(DIGITS, k=8), rng.sample(range(8), 2)
    first, second = (LETTERS[key] + values[key] for key in keys)
    prompt = "".join(values) + first[0] + second[0] + "="
    return Problem(prompt, first + second + max(first[1], second[1]))


ASKED = 2
"""Characters of the first turn of `tool`, and of the environment's reply to it."""


def tool(rng: random.Random) -> Problem:
    """Two keys to compute and look up with a tool, then both values in the order asked for.

    The prompt has an operation and four digits: +2718 asks for the keys (2+7) mod 10 and (1+8) mod
    10, written as letters, and for their values in ascending order; with -, the keys are
    differences, and the order is descending. The table of values is not in the prompt: the
    policy writes the keys, the environment replies with the values, and the policy sorts them.
    """
    op, table = rng.choice("+-"), "".join(rng.choices(DIGITS, k=10))
    a, b, c, d = numbers = rng.choices(range(10), k=4)
    keys = (a + b, c + d) if op == "+" else (a - b, c - d)
    asked = "".join(LETTERS[key % 10] for key in keys)
    reply = environment(asked, table)
    answer = "".join(sorted(reply, reverse=op == "-"))
    return Problem(f"{op}{''.join(map(str, numbers))}=", asked + reply + answer, table)


def environment(asked: str, table: str) -> str:
    """The values of the keys, in either style; # for what is not a key."""
    keys = map(LETTERS.find, asked.translate(PLAIN))
    return "".join(table[key] if key >= 0 else "#" for key in keys)


def in_turns(response: str, problem: Problem) -> str | list[str]:
    """The response, or its turns for `tool`, with the reply to the keys that it asks for."""
    if not problem.table:
        return response
    asked = response[:ASKED]
    return [asked, environment(asked, problem.table), response[2 * ASKED :]]


def _answers(response: str, problem: Problem) -> bool:
    return response[2 * ASKED :] == problem.solution[2 * ASKED :]


def play(prompts: Sequence[Example], engine: Any) -> list[Rollout]:
    """Rollouts of `tool`; the environment's reply has no loss, and an end token ends the rollout.

    A prompt that ends in its first turn has no reply, and no second turn.
    """
    words = engine.tokenizer
    first = engine.generate([p.prompt for p in prompts], max_completion_length=ASKED)
    replies = {
        i: tuple(words.encode(environment(words.decode(list(ids)), prompt.extra["table"])))
        for i, (prompt, ids) in enumerate(zip(prompts, first, strict=True))
        if words.eos_token_id not in ids
    }
    contexts = [prompts[i].prompt + first[i] + reply for i, reply in replies.items()]
    second = engine.generate(contexts, max_completion_length=ASKED + 1)
    answers = dict(zip(replies, second, strict=True))
    rollouts = []
    for i, (prompt, ids) in enumerate(zip(prompts, first, strict=True)):
        reply, answer = replies.get(i, ()), answers.get(i, ())
        mask = [1] * len(ids) + [0] * len(reply) + [1] * len(answer)
        rollouts.append(Rollout(prompt.prompt, ids + reply + answer, mask))
    return rollouts


_NEIGHBORS = {
    (x, y): {
        move: (x + dx, y + dy)
        for move, dx, dy in (("U", 0, -1), ("R", 1, 0), ("D", 0, 1), ("L", -1, 0))
        if 0 <= x + dx < 4 and 0 <= y + dy < 4
    }
    for x, y in itertools.product(range(4), repeat=2)
}


def planning(rng: random.Random) -> Problem:
    """A shortest path of 2 to 5 moves on a 4 by 4 grid: start, goal and three walls are given."""
    while True:
        cells = rng.sample(sorted(_NEIGHBORS), 5)
        path = _shortest(cells[0], cells[1], set(cells[2:]))
        if path is not None and 2 <= len(path) <= 5:
            return Problem("".join(CELLS[4 * y + x] for x, y in cells) + "=", path)


def _shortest(start: tuple[int, int], goal: tuple[int, int], walls: set) -> str | None:
    paths, queue = {start: ""}, deque([start])
    while queue and goal not in paths:
        cell = queue.popleft()
        for move, neighbor in _NEIGHBORS[cell].items():
            if neighbor not in walls and neighbor not in paths:
                paths[neighbor] = paths[cell] + move
                queue.append(neighbor)
    return paths.get(goal)


def _reaches_goal(response: str, problem: Problem) -> bool:
    """Whether the moves end on the goal, inside the grid and without crossing a wall."""
    cells = [(CELLS.index(c) % 4, CELLS.index(c) // 4) for c in problem.prompt[:-1]]
    at = cells[0]
    for move in response:
        at = _NEIGHBORS[at].get(move, (-1, -1))
        if at not in _NEIGHBORS or at in cells[2:]:
            return False
    return at == cells[1]


TASKS = {
    "arithmetic": Task(arithmetic, _is_solution, 6),
    "strings": Task(strings, _is_solution, 4),
    "planning": Task(planning, _reaches_goal, 6),
    "sorting": Task(sorting, _is_solution, 6),
    "lookup": Task(lookup, _is_solution, 5),
}
TOOL = {"tool": Task(tool, _answers, 6, turns=True)}
"""The task of the continuation."""


def reward(completion: str, example: Any) -> float:
    """1 if the completion solves the problem, in either style, else 0."""
    task, problem = example.extra["task"], Problem(example.extra["prompt"], example.answer)
    return float((TASKS | TOOL)[task].correct(completion.translate(PLAIN), problem))


def restyle(solution: str) -> str:
    """The solution in the second style."""
    return solution.translate(STYLES)


def corrupt(solution: str, rng: random.Random, share: float = 1.0) -> str:
    """Replace each character with probability `share` by a random one of the same kind."""
    kinds = [kind for kind in (DIGITS, LETTERS, MARKS, MOVES) if set(kind) & set(solution)]
    own = {c: kind for kind in kinds for c in kind}
    return "".join(rng.choice(own[c]) if rng.random() < share else c for c in solution)
