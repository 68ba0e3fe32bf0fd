"""Finds files of pretrained weights: in the user's folder, in torch's cache, else by a download into one of the two.

torchvision's files are checked against the hash in their name. Files on Hugging Face are downloaded by its library
into its cache, so its mirrors (`HF_ENDPOINT`), tokens and offline mode apply; their SHA-256 is checked against the one
in the URL, else the server's. Files at a URI of the user (`gs://`, `s3://`, `https://`) are cached under a name with a
hash of their version. A file gets its name only when it is complete. `load.py` reads the files.
"""

import hashlib
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from stoker_watch.errors import WeightsError, make_error, writing
from stoker_watch.printable import print_text
from stoker_watch.runs.records import BEST, CHECKPOINTS, FINAL
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

TIMEOUT_S = 30.0
"""A download fails after this time without data."""

WEIGHTS_DIR_VARIABLE = "STOKER_WEIGHTS_DIR"
HUB_URL = re.compile(
    r"https://huggingface\.co/(?P<repo_id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<filename>[^#]+)(?:#sha256=(\w+))?"
)
"""A file on Hugging Face: repository, revision, file name; its SHA-256 where that is known."""


def weights_dirs() -> list[Path]:
    """Folders in which weights are searched, in this order; downloads go to the first."""
    override = os.environ.get(WEIGHTS_DIR_VARIABLE)
    cache = Path(torch.hub.get_dir()) / "checkpoints"
    return [Path(override).expanduser(), cache] if override else [cache]


def file_name(url: str) -> str:
    """Name under which the file at `url` is searched in `weights_dirs`: all of Hugging Face's have the same one."""
    hub = HUB_URL.fullmatch(url)
    return hub["repo_id"].replace("/", "--") + Path(hub["filename"]).suffix if hub else url.rsplit("/", 1)[1]


def find_weights(url: str) -> Path | None:
    """The file of the weights at `url`, if it was downloaded before."""
    name = file_name(url)
    found = next((folder / name for folder in weights_dirs() if (folder / name).is_file()), None)
    if found is None and (hub := HUB_URL.fullmatch(url)):
        from huggingface_hub import try_to_load_from_cache  # takes 0.15 s

        cached = try_to_load_from_cache(**hub.groupdict())
        found = Path(cached) if isinstance(cached, str) else None
    return found


def fetch_weights(url: str) -> tuple[Path, str]:
    """(file, sentence about where it was found) of the weights at `url`. Raises WeightsError if the download fails."""
    if (found := find_weights(url)) is not None:
        return found, f"found in {found.parent}"
    path = weights_dirs()[0] / file_name(url)
    try:
        if hub := HUB_URL.fullmatch(url):
            target = _download_from_hub(hub)
        else:
            print_text(f"Downloading {url} to {path.parent}", file=sys.stderr, flush=True)
            _download(url, target := path)
    except Exception as error:  # httpx, the hub's library and http.client raise many types
        reason = error.__cause__ or error  # the hub's library says what it was in there: offline mode, no connection
        cause = next(iter(str(reason).splitlines()), type(reason).__name__)
        place = f"{path.parent} (or a folder in {WEIGHTS_DIR_VARIABLE})"
        place += "" if url.endswith(path.name) else f" as {path.name}"
        raise make_error(
            WeightsError, "weights-not-downloaded", url, cause=cause, name=path.name, place=place
        ) from error
    return target, f"downloaded to {target.parent}"


def local_path(location: str) -> Path:
    """The local file of a path or URI, with variables expanded; an object at a URI is downloaded once.

    Raises WeightsError if there is no such object, StorageError if it cannot be read or written to the cache.
    """
    location = expand_variables(location)
    if not is_uri(location):
        return Path(location)
    from stoker_watch.storage.store import download, open_store  # only needed for a URI

    uri = parse_uri(location)
    store = open_store(uri)
    info = store.stat(uri.key) if uri.key else None
    if info is None:
        raise WeightsError("There is no such object.", location=uri, fix="correct the URI of the weights")
    stem, dot, suffix = uri.name.rpartition(".")
    version = f"{uri}\0{info.etag}\0{info.modified_s!r}\0{info.size_bytes}"
    digest = hashlib.sha256(version.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    path = weights_dirs()[0] / (f"{stem}-{digest}.{suffix}" if dot else f"{suffix}-{digest}")
    if not path.is_file() or path.stat().st_size != info.size_bytes:
        print_text(f"Downloading {uri} to {path.parent}", file=sys.stderr, flush=True)
        fix = f"make room, or set {WEIGHTS_DIR_VARIABLE} to another folder"
        with writing("The weights cannot be written.", path.parent, fix=fix):
            download(store, uri.key, path)
    return path


def weights_of_run(path: Path, *, choices: Sequence[str] = ()) -> Path:
    """The weights in a run folder: best, else final, else those of the newest checkpoint. Raises WeightsError; choices:
    what the caller accepts, for the message."""
    checkpoints = sorted(path.glob(f"{CHECKPOINTS}/step-*/weights.safetensors"))[::-1]
    for file in (path / BEST, path / FINAL, *checkpoints):
        if file.is_file():
            return file
    cause = "neither best.safetensors nor final.safetensors nor a checkpoint" if path.is_dir() else "no such path"
    fix = "name a run folder with at least one evaluation or checkpoint, or a .safetensors file"
    raise WeightsError("There are no weights to use.", location=path, choices=choices, cause=cause, fix=fix)


def _download_from_hub(hub: re.Match[str]) -> Path:
    """The file in Hugging Face's cache. Raises OSError for another SHA-256 (the file is removed), and the library's."""
    from huggingface_hub import constants, hf_hub_download, hf_hub_url

    print_text(f"Downloading {hf_hub_url(**hub.groupdict())} to {constants.HF_HUB_CACHE}", file=sys.stderr, flush=True)
    path = Path(hf_hub_download(hub["repo_id"], hub["filename"], revision=hub["revision"]))
    blob = Path(os.readlink(path)).name if path.is_symlink() else ""  # the ETag: of a large file its SHA-256
    expected = hub[4] or (blob if re.fullmatch("[0-9a-f]{64}", blob) else None)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if expected not in (None, digest):
        for part in (path.resolve(), path.parent / os.readlink(path) if blob else path, path):
            part.unlink(missing_ok=True)
        raise OSError(f"its SHA-256 is {digest}, it should be {expected}: damaged, or another version")
    return path


def _download(url: str, path: Path) -> None:
    """torchvision's names end with the first digits of the file's SHA-256: `resnet50-0676ba61.pth`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    expected = torch.hub.HASH_REGEX.search(path.name)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        torch.hub.download_url_to_file(url, str(path), expected and expected[1], progress=sys.stderr.isatty())
    finally:
        socket.setdefaulttimeout(before)
