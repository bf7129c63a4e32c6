"""Finds, reads and writes profiles: those that come with the package, and files of others."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from cluster.errors import ConfigurationError
from cluster.planning.profile.model import Profile

FOLDER = Path(__file__).parents[1] / "profiles"


def shipped_profiles() -> dict[str, Path]:
    """The profiles of the package, by name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.json"))}


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or any by the path of its file.

    Raises:
        ConfigurationError: there is none, or the file is no profile.
    """
    file = shipped_profiles().get(name, Path(name))
    try:
        return Profile.model_validate_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError) as error:
        names = ", ".join(shipped_profiles())
        raise ConfigurationError(
            f"no profile is called {name!r}, and it is no file; the package has: {names}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the profile {name}: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(f"{name} is not a profile: {first_problem(error)}") from error


def save_profile(profile: Profile, file: Path) -> None:
    """Write a profile, over what was there.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        file.write_text(profile.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error}") from error


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's complaints, with the place of the field that it is about."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{place}: {problem['msg']}"
