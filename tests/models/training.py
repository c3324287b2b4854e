"""Train a tiny model until greedy decoding reproduces each of its conversations verbatim.

Only the assistant's tokens count in the loss, because predicting the questions would take most of the steps. A step
sees rows of random conversations one behind the other. A question is therefore also learned behind other conversations.
Some steps use one of the long prompts. Training ends when every token of every required conversation leads by a margin.
With that margin a batch, another order of sums or another BLAS changes no answer. Nothing depends on the clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

Forward = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The token ids of a prompt and of its reply, including the end."""

    prompt: list[int]
    reply: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.reply)

    def as_row(self) -> "Row":
        """Return a row that holds only this lesson."""
        row = Row()
        row.add(self)
        return row


LEARNED = 0.1
"""Loss (nats per token) above which the lessons are not checked."""
Topic = Sequence[Lesson]
"""Lessons that teach one reply, after different openings."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of training, tuned by experiments on one core for the shortest time over all families."""

    tokens: int = 512
    """Tokens of a batch; small batches learn more in the same time."""
    long: int = 300
    """Tokens from which a lesson is long: its attention costs as much as many short ones."""
    long_every: int = 32
    """Steps from one long lesson to the next; other steps use only the ends of their prompts."""
    earlier: float = 0.05
    """Share of rows that begin with another lesson, as a conversation of several turns does."""
    blur: int = 12
    """Random change of lengths in tokens before rows of similar length are grouped."""
    peak_rate: float = 3e-3
    warm_up: int = 20
    falling: int = 250
    """Steps over which the learning rate falls to a tenth and then stays there."""
    steps: int = 800
    """Training fails after this number of steps; 260 to 340 are usual."""
    look_every: int = 20
    margin: float = 1.0
    """Logits by which each learned token must lead the second."""
    seed: int = 0


QUICK = Plan()
"""For models that are trained on every new machine. They learn each question, but not behind other conversations."""
PATIENT = Plan(tokens=768, earlier=0.7, falling=500, margin=3.0)
"""For the model in the package: mostly right also in later turns and behind system prompts that it never saw."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of training; `wrong` is the number of lessons that were not reproduced by the margin."""

    steps: int
    loss: float
    wrong: int


@dataclass(slots=True)
class Row:
    """Tokens in sequence, and for each whether the model must predict it."""

    tokens: list[int] = field(default_factory=list[int])
    counts: list[bool] = field(default_factory=list[bool])

    def add(self, lesson: Lesson) -> None:
        """Append a lesson."""
        self.tokens += lesson.prompt + lesson.reply
        self.counts += [False] * len(lesson.prompt) + [True] * len(lesson.reply)


Batch = tuple[mx.array, mx.array, mx.array]
"""Inputs, the token after each, and 1.0 where the model must predict that token."""


def batch(rows: Sequence[Row]) -> Batch:
    """Pad rows at their end to one length."""
    width = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    counts = np.zeros((len(rows), width), np.float32)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)] = row.tokens
        counts[place, : len(row.counts)] = row.counts
    return mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:]), mx.array(counts[:, 1:])


class Course:
    """Draws the batches, epoch by epoch. Lessons of similar length form a batch, with little padding."""

    def __init__(self, topics: Sequence[Topic], plan: Plan) -> None:
        self._short = [topic for topic in topics if len(topic[0]) < plan.long]
        self._long = [lesson for lesson, *_ in topics if len(lesson) >= plan.long]
        self._plan = plan
        self._random = np.random.default_rng(plan.seed)
        self._batches: list[Batch] = []
        self._again: list[Lesson] = []

    def at(self, step: int) -> Batch:
        """Return the batch of a step. After the warm-up every `long_every`th step is one of the long lessons."""
        turn, rest = divmod(step, self._plan.long_every)
        if self._long and step >= self._plan.warm_up and not rest:
            return batch([self._long[turn % len(self._long)].as_row()])
        if not self._batches:
            self._batches = self._epoch()
        return self._batches.pop()

    def repeat(self, lessons: Sequence[Lesson]) -> None:
        """Repeat these lessons in the next epochs, in place of an earlier list."""
        self._again = [lesson for lesson in lessons if len(lesson) < self._plan.long]

    def _epoch(self) -> list[Batch]:
        rows = [self._short_row(topic) for topic in self._short]
        rows += [lesson.as_row() for lesson in self._again]
        rows += [self._tail(lesson).as_row() for lesson in self._long]
        rows.sort(key=lambda row: len(row.tokens) + self._random.integers(self._plan.blur))
        made: list[list[Row]] = [[]]
        for row in rows:
            if (len(made[-1]) + 1) * len(row.tokens) > self._plan.tokens and made[-1]:
                made.append([])
            made[-1].append(row)
        return [batch(made[n]) for n in self._random.permutation(len(made))]

    def _short_row(self, topic: Topic) -> Row:
        row = Row()
        if self._random.random() < self._plan.earlier:
            row.add(self._any(self._short[self._random.integers(len(self._short))]))
        row.add(self._any(topic))
        return row

    def _any(self, topic: Topic) -> Lesson:
        return topic[int(self._random.integers(len(topic)))]

    def _tail(self, lesson: Lesson) -> Lesson:
        kept = int(self._random.integers(40, self._plan.long))
        return Lesson(lesson.prompt[-kept:], lesson.reply)


def _rate(plan: Plan, step: int) -> float:
    """Return the learning rate of a step: a linear rise in the warm-up, then a fall along a cosine to a tenth."""
    rise = min(1.0, (step + 1) / plan.warm_up)
    return plan.peak_rate * rise * (0.55 + 0.45 * float(np.cos(np.pi * min(1.0, step / plan.falling))))


def _loss(model: Forward, inputs: mx.array, targets: mx.array, counts: mx.array) -> mx.array:
    each = nn.losses.cross_entropy(model(inputs), targets)
    return (each * counts).sum() / counts.sum()


def _leads(model: Forward, lessons: Sequence[Lesson], margin: float) -> list[bool]:
    """Return for each lesson whether every token's logit leads by the margin."""
    inputs, targets, counts = batch([lesson.as_row() for lesson in lessons])
    logits = model(inputs)
    meant = mx.take_along_axis(logits, targets[..., None], axis=-1)
    others = mx.put_along_axis(logits, targets[..., None], mx.array(-mx.inf), axis=-1).max(axis=-1)
    enough = (meant[..., 0] - others >= margin) | (counts == 0)
    return np.array(enough.all(axis=-1)).tolist()


def unsure(model: Forward, lessons: Sequence[Lesson], margin: float, at_once: int = 16) -> list[Lesson]:
    """Return the lessons that greedy decoding would not reproduce by the margin."""
    ordered = sorted(lessons, key=len)
    parts = [ordered[n : n + at_once] for n in range(0, len(ordered), at_once)]
    return [
        lesson for part in parts for lesson, known in zip(part, _leads(model, part, margin), strict=True) if not known
    ]


def train(model: nn.Module, topics: Sequence[Topic], plan: Plan, tell: Callable[[str], None]) -> Outcome:
    """Train until all lessons are known by the margin, at most `plan.steps` steps."""
    course = Course(topics, plan)
    lessons = [lesson for topic in topics for lesson in topic]
    optimizer = optim.AdamW(learning_rate=plan.peak_rate, betas=[0.9, 0.98], weight_decay=0.0)
    slope = nn.value_and_grad(model, _loss)
    loss, wrong, step = 9.0, lessons, 0
    while wrong and step < plan.steps:
        optimizer.learning_rate = _rate(plan, step)
        value, gradients = slope(model, *course.at(step))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, value)
        loss = 0.9 * loss + 0.1 * float(value.item())
        step += 1
        if step % plan.look_every:
            continue
        if loss < LEARNED:
            wrong = unsure(model, wrong, plan.margin) or unsure(model, lessons, plan.margin)
            course.repeat(wrong)
        tell(f"step {step}: loss {loss:.3f}, {len(wrong)} of {len(lessons)} not known")
    return Outcome(step, loss, len(wrong))
