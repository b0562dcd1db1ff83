"""Reading a configuration strictly: every key is taken once, and all findings come in one error."""

import json
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")
D = TypeVar("D")
N = TypeVar("N")

Source = str | os.PathLike[str] | Mapping[str, Any]

# A configuration lists its layers; a hostile count must not fill the memory.
MAX_LAYERS = 2**12


class ConfigError(ValueError):
    """A configuration that is not understood completely.

    Attributes:
      findings: one sentence for each thing that is wrong; each names the key.
    """

    def __init__(self, message: str, findings: Collection[str] = ()):
        super().__init__(message)
        self.findings = tuple(findings)


def config_error(function: str, findings: Collection[str]) -> ConfigError:
    """The error that holds `findings`."""
    if len(findings) == 1:
        return ConfigError(f"{function}: {next(iter(findings))}", findings)
    lines = "".join(f"\n- {finding}" for finding in findings)
    must = f"every key must be understood; got {len(findings)} findings"
    return ConfigError(f"{function}: {must}:{lines}", findings)


def load(function: str, source: Any, file_name: str) -> dict[str, Any]:
    """Return the object in `source`: a folder that holds `file_name`, that file, or the object."""
    entries: Any
    if isinstance(source, Mapping):
        entries = dict(source)
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        entries = _parse(function, path / file_name if path.is_dir() else path)
    else:
        got = reprlib.repr(source)
        raise TypeError(f"{function}: source must be a path or a mapping; got source={got}")
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        must = "the configuration must be a mapping from names"
        raise config_error(function, [f"{must}; got {reprlib.repr(entries)}"])
    return entries


def _parse(function: str, path: Path) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The json module keeps the last of two equal keys and drops the other without a word.
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            found = [f"{name} must be given once; got it twice in {path}" for name in twice]
            raise config_error(function, found)
        return dict(pairs)

    try:
        return json.loads(path.read_bytes(), object_pairs_hook=once)
    except ConfigError:
        raise
    except OSError as error:
        found = f"the configuration must be a readable file; got {path} ({error.strerror})"
    except (ValueError, RecursionError) as error:
        found = f"the configuration must be JSON in UTF-8; got {path} ({error})"
    raise config_error(function, [found])


class Unfit(Exception):
    """A value is not of the kind asked for; the text says what it must be."""


def integer(minimum: int, maximum: int = 2**31 - 1) -> Callable[[Any], int]:
    """An integer from `minimum` to `maximum`."""

    def parse(value: Any) -> int:
        if _is_integer(value) and minimum <= value <= maximum:
            return int(value)
        raise Unfit(f"an integer from {minimum} to {maximum}")

    return parse


size = integer(1)


def token(value: Any) -> int:
    """An integer: negative ids of special tokens occur, and mean none."""
    if not _is_integer(value):
        raise Unfit("an integer")
    return int(value)


def tokens(value: Any) -> tuple[int, ...]:
    """One id or a list of ids."""
    return tuple(map(token, value)) if isinstance(value, list | tuple) else (token(value),)


def number(minimum: float = 0.0, *, strict: bool = True) -> Callable[[Any], float]:
    """A finite number above `minimum`, or with `strict` false at least `minimum`."""

    def parse(value: Any) -> float:
        if not isinstance(value, bool) and isinstance(value, numbers.Real):
            try:
                result = float(value)
            except OverflowError:  # An integer beyond the largest float.
                result = math.inf
            if math.isfinite(result) and (result > minimum or (result == minimum and not strict)):
                return result
        raise Unfit(f"a finite number {'above' if strict else 'of at least'} {minimum:g}")

    return parse


def flag(value: Any) -> bool:
    """True or false, and no number that could mean either."""
    if not isinstance(value, bool):
        raise Unfit("true or false")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Unfit("a mapping from names")
    return dict(value)


def names(value: Any) -> tuple[str, ...]:
    """A list of strings."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise Unfit("a list of names")
    return tuple(value)


def one_of(options: Mapping[str, T]) -> Callable[[Any], T]:
    """One of the names in `options`; gives what the name stands for."""

    def parse(value: Any) -> T:
        if not isinstance(value, str) or value not in options:
            raise Unfit(f"one of {', '.join(options)}")
        return options[value]

    return parse


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


class Missing(Enum):
    """Stands where a default would; the value says why there is none."""

    REQUIRED = "a constant of the model has no default"
    ARGUMENT = "the file does not say, so it must be passed"


REQUIRED = Missing.REQUIRED


class Reader:
    """The entries of a configuration, taken one by one; `findings` gathers what is wrong with them.

    A value that had a finding comes back as None, whatever its kind: the caller asks `good` before
    computing with it, and raises in the end.
    """

    def __init__(self, entries: Mapping[str, Any], findings: list[str], *, prefix: str = ""):
        self._left = dict(entries)
        self._bad: set[str] = set()
        self._prefix = prefix
        self.findings = findings

    def take(
        self,
        key: str,
        kind: Callable[[Any], T],
        *,
        default: D | Missing = REQUIRED,
        null: N | Missing = REQUIRED,
    ) -> T | D | N:
        """Take `key`: parsed by `kind`, or `default` if it is absent, or `null` if it is null."""
        if key not in self._left:
            if isinstance(default, Missing):
                self.find(key, f"{self._prefix}{key} is missing: {default.value}")
                return cast(T, None)
            return default
        value = self._left.pop(key)
        if value is None and not isinstance(null, Missing):
            return null
        try:
            return kind(value)
        except Unfit as must:
            self.require(False, f"{self._prefix}{key} must be {must}", {key: value})
            return cast(T, None)

    def find(self, key: str, finding: str) -> None:
        """Note a finding about `key`."""
        self._bad.add(key)
        self.findings.append(finding)

    def require(self, condition: bool, must: str, got: Mapping[str, Any]) -> None:
        """Note a finding about the values in `got` unless `condition` holds."""
        if not condition:
            self._bad.update(got)
            values = [f"{self._prefix}{key}={reprlib.repr(value)}" for key, value in got.items()]
            self.findings.append(f"{must}; got {', '.join(values)}")

    def good(self, *keys: str) -> bool:
        """Whether none of `keys` had a finding."""
        return self._bad.isdisjoint(keys)

    def neutral(self, key: str, values: tuple[Any, ...], why: str) -> None:
        """Take `key`, which if given may have one of `values` only."""
        if key in self._left:
            value = self._left.pop(key)
            # Equal is not enough: False == 0 == 0.0 in Python.
            fits = any(type(value) is type(other) and value == other for other in values)
            allowed = " or ".join(json.dumps(other) for other in values)
            self.require(fits, f"{self._prefix}{key} must be {allowed}: {why}", {key: value})

    def abandon(self) -> None:
        """Leave the rest unjudged."""
        self._left.clear()

    def finish(
        self,
        without_effect: Collection[str] = (),
        without_effect_at: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> None:
        """Every key that is left must be known to be without effect."""
        for key, values in (without_effect_at or {}).items():
            self.neutral(key, values, "nothing else is computed")
        for key, value in self._left.items():
            must = f"{self._prefix}{key} is neither understood nor known to be without effect"
            self.require(key in without_effect, must, {key: value})
