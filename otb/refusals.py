"""Options as refusals read them, and as whoever set them wrote them: one rule serves a script and a run.

A script sets fields of trl.GRPOConfig and arguments of OTBTrainer. A run sets keys of its command line, whose words
experiments/running/grpo_options.py knows. `refuse` of otb/training/options.py asks for both. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

NOW = object()  # the value that the option has


class Taken(NamedTuple):
    """Lists the values of an option that work, the recommended one first, and says why no other does."""

    option: str
    values: tuple
    rule: str


class Code(str):
    """A value that is written without quotes, such as LoraConfig(...)."""

    def __repr__(self) -> str:
        return str(self)


class Options:
    """Answers for an option of GRPOConfig or an argument of OTBTrainer by its name; None where nobody set it.

    None is TRL's own default then, which no rule refuses. This class has the words of a script.

    Args:
        args: a GRPOConfig, or None.
        more: values by name, which win over those of args. `sharded` says whether FSDP or DeepSpeed divides the policy.
    """

    SAID: dict[tuple[str, Any], str] = {  # settings that have no option of their own
        ("sharded", True): "FSDP or DeepSpeed",
        ("sharded", False): "plain data parallelism",
    }

    def __init__(self, args: Any = None, **more: Any):
        self._args, self._more = args, more

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self._more[name] if name in self._more else getattr(self._args, name, None)
        return value.value if isinstance(value, Enum) else value

    def but(self, **changed: Any) -> Options:
        """Returns the same options with other values for some of them."""
        return type(self)(self._args, **(self._more | changed))

    def key(self, name: str) -> str:
        """Returns the name by which the asker sets an option."""
        return name

    def written(self, value: Any) -> str:
        """Returns a value as the asker writes it."""
        plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict)
        return repr(value) if plain else f"{type(value).__name__}(...)"

    def says(self, name: str, value: Any = NOW) -> str:
        """Returns a setting as the asker writes it: top_p=0.9 in a script, trainer.top_p=0.9 in a run."""
        value = getattr(self, name) if value is NOW else value
        said = self.SAID.get((name, value)) if isinstance(value, bool | str | None) else None
        return said or f"{self.key(name)}={self.written(value)}"

    def batch(self, forward: int, accumulation: int) -> str:
        """Returns the settings for so many rollouts of a process in a forward, and so many forwards in a step."""
        return f"per_device_train_batch_size={forward} and gradient_accumulation_steps={accumulation}"

    def refusal(self, name: str, rule: str, *fixes: tuple[str, Any] | str, value: Any = NOW) -> ValueError:
        """Returns the error to raise: the setting of `name`, the rule that it breaks, and what to use instead.

        rule: follows the setting, with a space where it does not begin with a colon. fixes: settings or text.
        """
        use = ", or ".join(fix if isinstance(fix, str) else self.says(*fix) for fix in fixes)
        return ValueError(f"{self.says(name, value)}{'' if rule[0] == ':' else ' '}{rule}. Use {use}.")

    def refuse_others(self, table: Iterable[Taken], *instead: tuple[str, Any] | str) -> None:
        """Raises ValueError for an option whose value is set and not taken. instead: of what does not work with it."""
        for option, values, rule in table:
            if (value := getattr(self, option)) is not None and value not in values:
                others = f" (or {', '.join(map(str, values[1:]))})" if values[1:] else ""
                raise self.refusal(option, rule, self.says(option, values[0]) + others, *instead)

    def refuse_sharding(self, reader: str, *instead: tuple[str, Any] | str) -> None:
        """Raises ValueError where FSDP or DeepSpeed divides what `reader` needs. instead: of what needs it."""
        if self.sharded:
            rule = f"divides weights and gradients over the processes, and {reader} on every process"
            raise self.refusal("sharded", rule, ("sharded", False), *instead)
