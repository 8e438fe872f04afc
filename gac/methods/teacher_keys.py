"""The keys of the configuration's `teacher` that a method accepts; the others are errors."""

from __future__ import annotations

from dataclasses import fields

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
    name, default = repr(method.name), TeacherConfig()
    for field in fields(TeacherConfig):
        given, used = getattr(base, field.name), getattr(teacher, field.name)
        if given == getattr(default, field.name):
            continue
        key = f"teacher.{field.name}={given!r}"
        if used != given:
            own = {"loss": "kl_direction"}.get(field.name, field.name)
            is_field = own in {f.name for f in fields(method)}
            advice = f"use method.{own} instead" if is_field else "remove the key"
            raise ValueError(f"{key}: method {name} sets it to {used!r}; {advice}")
        if not teacher.active:
            raise ValueError(
                f"{key} has no effect without a teacher: set teacher.path or teacher.self=true, or "
                "remove the key"
            )
    if not teacher.active:
        if needs.teacher:
            raise ValueError(
                f"teacher.path=null: method {name} needs a teacher: set teacher.path to a model, "
                "or teacher.self=true"
            )
        return
    key = "teacher.self=true" if teacher.self else f"teacher.path={teacher.path!r}"
    obstacle = ""
    if not needs.rollouts:
        obstacle = "has no rollouts, which a teacher scores"
    elif loss.token is not None:
        obstacle = "has a loss of its own, to which no teacher's is added"
    elif needs.parts:
        obstacle = "weighs the gradients of two terms, and a teacher's would be a third"
    if obstacle:
        raise ValueError(
            f"{key}: method {name} {obstacle}: remove the teacher, or use opd, grpo or "
            "constant-alarm"
        )
