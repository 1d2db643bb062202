"""Sources: the hash of one file or directory of the user's own, which the stages that use it depend on."""

from rloo_pipeline import fingerprint
from rloo_pipeline.config import SourceConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import Layout
from rloo_pipeline.sources import missing


def run(layout: Layout, name: str, config: SourceConfig) -> None:
    """Write the source's hash; raises UserError if there is no such file."""
    path = layout.root / config.path
    if not path.exists():
        raise UserError(f"sources.{name}.path: {missing(config.path)}")
    record = {"path": config.path.as_posix(), "sha256": fingerprint.of_path(path)}
    write_json(layout.source(config.used_by, name), record, staging=layout.state)
