"""Finds the GGUF file of a name: a path, a name in a folder or repository, or `folder:Q4_K_M`. No torch here."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from quire import logs
from quire.errors import ConfigError, WeightsError
from quire.gguf.file import SPLIT_NAME, is_gguf
from quire.loader.gguf_headers import fetch_headers
from quire.loader.hub import cached_file, download_files, list_files, local_folder, local_path
from quire.loader.object_store import is_stored, mirror
from quire.messages import Progress

logger = logs.get_logger(__name__)

# Types in names of files: Q4_K_M, IQ4_XS, Q8_0, BF16, ...
_TYPE = r"(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|F16|F32)"
_TYPE_IN_NAME = re.compile(rf"(?:^|[-._/])({_TYPE})(?=$|[-._/])", re.IGNORECASE)
_NAME_AND_TYPE = re.compile(rf"(?P<model>.+):(?P<type>{_TYPE})", re.IGNORECASE)
_MAX_PARTS = 1000
_NO_MODELS = "*mmproj*"  # the vision parts of models, which are in the same folder


class _Hub(NamedTuple):
    """How files of the hub are read: see `resolve_model`."""

    revision: str | None
    download_dir: str | None
    token: str | None
    progress: Progress | None


def find_gguf(
    model: str | None,
    gguf_file: str | None,
    revision: str | None = None,
    download_dir: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    *,
    weights: bool = True,
) -> Path | None:
    """The file that `--model` and `--gguf-file` name, downloaded if necessary; None if they name no GGUF file.

    Args:
        model: folder, file, hub id or URL, or one of these with a type after a colon, as `org/model-GGUF:Q4_K_M`.
        gguf_file: a path, or the name of a file in the model's folder or repository.
        weights: False: do not download a file of the hub; a file of its length holds only its header.
        The other arguments: see `resolve_model`.

    Raises ConfigError with the possible names if no model or more than one model fits.
    """
    hub = _Hub(revision, download_dir, token, progress)
    if is_stored(model) and model is not None and model.lower().endswith(".gguf"):
        if gguf_file is not None:
            raise ConfigError(
                "Two GGUF files are named", value=[model, gguf_file], fix="Leave one of the two out", param="gguf_file"
            )
        model, _, gguf_file = model.rpartition("/")
    if gguf_file is not None:
        return _named_file(model, gguf_file, hub, weights=weights)
    if not model:
        return None
    path = local_path(model)
    if path.is_file():
        return _checked(path, "model")
    if path.is_dir():
        is_folder_of_files = not (path / "config.json").exists() and bool(_files_in(path))
        return _choose(path, None, model, _files_in(path)) if is_folder_of_files else None
    named = _NAME_AND_TYPE.fullmatch(model)
    return None if named is None else _file_of_type(named["model"], named["type"], hub, weights=weights)


def _named_file(model: str | None, gguf_file: str, hub: _Hub, *, weights: bool) -> Path:
    """A file by its path, or by its name in the folder or repository of the model."""
    path = local_path(gguf_file, "gguf_file")
    if model is None or (path.is_file() and not is_stored(model)):
        return _checked(path, "gguf_file")
    folder = local_folder(model)
    if folder is None and not weights and (header := _header(model, gguf_file, hub)):
        return _checked(header, "gguf_file")
    if folder is None:
        folder = download_files(model, *hub, _with_parts(gguf_file))
    path = folder / gguf_file
    if not path.is_file():
        names = _files_in(folder) or _gguf_only(list_files(model, hub.revision, hub.token))
        raise _no_such_file(f"{model} has no file {gguf_file}", names, "gguf_file")
    return _checked(path, "gguf_file")


def _file_of_type(model: str, wanted: str, hub: _Hub, *, weights: bool) -> Path:
    """The only file of a type in the folder or repository of the model."""
    folder = local_folder(model)
    if folder is not None:
        return _choose(folder, wanted, model, _files_in(folder))
    if there := list_files(model, hub.revision, hub.token):
        name = _chosen(wanted, model, _gguf_only(name for name in there if name.count("/") <= 1))
        if not weights and (header := _header(model, name, hub)):
            return _checked(header, "model")
        return _checked(download_files(model, *hub, _with_parts(name)) / name, "model")
    folder = download_files(model, *hub, _patterns(wanted), [_NO_MODELS])  # they are in the cache
    return _choose(folder, wanted, model, _files_in(folder))


def _header(repo: str, name: str, hub: _Hub) -> Path | None:
    """A file with the header of a file on the hub, or the file itself if it is in the cache; None: download it."""
    part = SPLIT_NAME.fullmatch(name)
    count = 1 if part is None else int(part["count"])
    if not 1 <= count <= _MAX_PARTS:
        return None
    names = [name] if part is None else [_part_name(name, part, number) for number in range(1, count + 1)]
    if is_stored(repo):
        return mirror(repo, [glob.escape(each) for each in names], with_holes=True) / names[0]
    if all(cached_file(repo, each, hub.revision, hub.download_dir) for each in names):
        return cached_file(repo, names[0], hub.revision, hub.download_dir)
    try:
        return fetch_headers(repo, names, hub.revision, hub.token) / Path(names[0]).name
    except WeightsError:
        raise
    except Exception as error:  # errors of the HTTP client too; the library's versions have different ones
        logger.warning("the header of %s cannot be read alone (%s): the file is downloaded", name, error)
        return None


def _part_name(name: str, part: re.Match[str], number: int) -> str:
    """The name of another part of a model, in the spelling of `name`."""
    return f"{name[: part.start('number')]}{number:05}{name[part.end('number') :]}"


def _checked(path: Path, param: str) -> Path:
    if not is_gguf(path):
        raise ConfigError(
            "There is no such file" if not path.is_file() else "The file is not a GGUF file",
            value=str(path),
            expected="a GGUF file, or the folder that holds config.json and *.safetensors",
            param=param,
        )
    return path


def _files_in(folder: Path) -> list[str]:
    """The models in a folder and its subfolders: the first file of each."""
    found = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]
    return _gguf_only(str(path.relative_to(folder)) for path in found)


def _gguf_only(names: Iterable[str]) -> list[str]:
    """The names of models: the first file of each."""
    kept = []
    for name in sorted(names):
        part = SPLIT_NAME.fullmatch(name)
        is_first = part is None or int(part["number"]) == 1
        if name.lower().endswith(".gguf") and "mmproj" not in name.lower() and is_first:
            kept.append(name)
    return kept


def _type_of(name: str) -> str | None:
    """The type in a name, for example `Q4_K_M` in `model-Q4_K_M-00001-of-00002.gguf`."""
    part = SPLIT_NAME.fullmatch(name)
    found = _TYPE_IN_NAME.findall(name[: -len(".gguf")] if part is None else part["stem"])
    return found[-1] if found else None


def _choose(folder: Path, wanted: str | None, model: str, names: list[str]) -> Path:
    return _checked(folder / _chosen(wanted, model, names), "model")


def _chosen(wanted: str | None, model: str, names: list[str]) -> str:
    """The only model among `names` that has the wanted type; None: any type."""
    found = names if wanted is None else [n for n in names if (_type_of(n) or "").lower() == wanted.lower()]
    if len(found) == 1:
        return found[0]
    types = sorted({kind for name in names if (kind := _type_of(name)) is not None})
    if len(found) > 1 and wanted is None and len(types) == len(names):
        raise ConfigError(
            f"{model} holds several GGUF models",
            value=names[:20],
            expected="one of " + ", ".join(f"{model}:{kind}" for kind in types),
            param="model",
        )
    if found:
        raise ConfigError(
            f"{model} holds several GGUF models" + ("" if wanted is None else f" of type {wanted}"),
            value=found[:20],
            fix=f"Name one with --gguf-file, for example --model {model} --gguf-file {found[0]}",
            param="model",
        )
    raise _no_such_file(f"{model} has no GGUF model of type {wanted}", types or names, "model")


def _no_such_file(what: str, there: list[str], param: str) -> ConfigError:
    return ConfigError(what, expected="one of " + ", ".join(there[:40]) if there else "a GGUF file", param=param)


def _with_parts(name: str) -> list[str]:
    """File patterns for all parts of the model with this file."""
    escaped = glob.escape(name)
    return [escaped, re.sub(r"-\d{5}-of-", "-?????-of-", escaped)]


def _patterns(wanted: str) -> list[str]:
    """File patterns for names with a type in them, in upper or lower case."""
    spelled = "".join(f"[{char.lower()}{char.upper()}]" if char.isalpha() else char for char in wanted)
    return [f"{start}{spelled}{end}.gguf" for start in ("", "*[-._/]") for end in ("", "[-._/]*")]
