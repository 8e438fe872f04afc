"""The keys of the configuration's `teacher` that a method accepts; the others are errors."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gac.types import StepNeeds

from .base import Loss, Method
from .teacher import TeacherConfig


def check_teacher(
    method: Method, base: TeacherConfig, teacher: TeacherConfig, needs: StepNeeds, loss: Loss
) -> None:
    """Raise ValueError if a key of `base`, the `teacher` section of a run, has no effect.

    Also if the method cannot have a teacher, or lacks one. teacher: the run's teacher. needs: the
    union of the method's needs in all steps. loss: the run's loss.
    """
    check_keys(method, base, teacher)
    if not teacher.active:
        if needs.teacher:
            raise ValueError(
                f"teacher.path=null: method {method.name!r} needs a teacher: set teacher.path to a "
                "model, or teacher.self=true"
            )
        for name, given in _changed(base):
            raise ValueError(
                f"teacher.{name}={given!r} has no effect without a teacher: set teacher.path or "
                "teacher.self=true, or remove the key"
            )
        return
    key = "teacher.self=true" if teacher.self else f"teacher.path={teacher.path!r}"
    if reason := obstacle(method, needs, loss):
        raise ValueError(
            f"{key}: method {method.name!r} {reason}: remove the teacher, or use opd, grpo or "
            "constant-alarm"
        )


def check_keys(method: Method, base: TeacherConfig, teacher: TeacherConfig) -> None:
    """Raise ValueError if the method sets a key of `base` to another value, that of `teacher`."""
    for name, given in _changed(base):
        used = getattr(teacher, name)
        if used != given:
            own = {"loss": "kl_direction"}.get(name, name)
            is_field = own in {f.name for f in fields(method)}
            advice = f"use method.{own} instead" if is_field else "remove the key"
            raise ValueError(
                f"teacher.{name}={given!r}: method {method.name!r} sets it to {used!r}; {advice}"
            )


def obstacle(method: Method, needs: StepNeeds, loss: Loss) -> str:
    """Why no teacher's loss can be added to that of the method; "" if it can.

    needs: the union of the method's needs in all steps. loss: its loss.
    """
    if not needs.rollouts:
        return "has no rollouts, which a teacher scores"
    if loss.token is not None:
        return "has a loss of its own, to which no teacher's is added"
    if needs.parts:
        return "weighs the gradients of two terms, and a teacher's would be a third"
    return ""


def _changed(base: TeacherConfig) -> list[tuple[str, Any]]:
    """The keys that differ from their defaults, with their values."""
    default = TeacherConfig()
    given = [(field.name, getattr(base, field.name)) for field in fields(TeacherConfig)]
    return [(name, value) for name, value in given if value != getattr(default, name)]
