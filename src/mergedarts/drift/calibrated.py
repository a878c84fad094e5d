"""A repaired model's own calibration again: its models, its prompts and which of them were held out.

Knows what `darts_config.json` records of them, and checks that they are still the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import RunFile, parse_run
from ..correction import Correction
from ..errors import UserError
from ..files import is_file
from ..job import DomainJob, Job
from ..repaired import CONFIG, read_config, read_corrections


@dataclass(frozen=True)
class Calibrated:
    """A repaired model's folder.

    Attributes:
        corrections: by domain.
    """

    folder: Path
    config: dict[str, Any]
    corrections: dict[str, Correction]

    @classmethod
    def read(cls, folder: Path) -> Calibrated:
        return cls(folder, read_config(folder), read_corrections(folder))

    def run(
        self,
        prompts: dict[str, str],
        experts: dict[str, str],
        held_out: dict[str, Path],
        examples: int,
        changes: dict[str, Any],
    ) -> tuple[RunFile, set[str]]:
        """The settings that give the calibration's sequences again; `changes` that are None leave what it had.

        Returns:
            The settings, and the domains whose calibration prompts are gone, so that `held_out` takes their place.
        """
        fresh: set[str] = set()
        described, settings = self.config["domains"], self.config["settings"]
        for name in [*prompts, *experts, *held_out]:
            if name not in described:
                raise UserError(f"{self.folder} has no domain '{name}'; choose one of {', '.join(described)}.")
        domains = {}
        for name, entry in described.items():
            source = dict(entry.get("source") or {})
            # Of a folder written before its prompts were recorded, their number alone is known.
            source.setdefault("samples", max(1, sum(entry["sequences"].values())))
            source["prompts"] = prompts.get(name, source.get("prompts"))
            if isinstance(source["prompts"], str):
                source["prompts"] = str(Path(source["prompts"]).expanduser().absolute())
            gone = source["prompts"] is None or (
                isinstance(source["prompts"], str) and not is_file(Path(source["prompts"]))
            )
            if gone and name in held_out and name not in prompts:
                source |= {"prompts": str(held_out[name].absolute()), "samples": examples}
                fresh.add(name)
            elif source["prompts"] is None or (gone and name not in prompts):
                where = f" at {source['prompts']}" if source["prompts"] else ""
                raise UserError(
                    f"The calibration prompts of domain '{name}' are not{where or ' recorded in ' + str(self.folder)}; "
                    f"say where they are with '--prompts {name}=FILE', or measure on others with '--held-out "
                    f"{name}=FILE'."
                )
            domains[name] = {"expert": experts.get(name, entry["expert"]), **source}
        given = {key: value for key, value in changes.items() if value is not None}
        run = parse_run(
            {
                "merged": self.config["merged"]["model"],
                "domains": domains,
                "fit": {key: settings["fit"][key] for key in ("seed", "holdout")},
                "dtype": settings["dtype"],
                "max_tokens": settings.get("max_tokens", RunFile.model_fields["max_tokens"].default),
                **given,
            },
            str(self.folder / CONFIG),
        )
        return run, fresh

    def check_models(self, job: Job) -> None:
        """Raise `UserError` where merged model or experts are others than those of the calibration."""
        if job.merged_print != self.config["merged"]["fingerprint"]:
            raise UserError(
                f"The corrections in {self.folder} were made for another model than {job.merged} is now; "
                "calibrate on this one again."
            )
        for domain in job.domains:
            if domain.expert_print != self.config["domains"][domain.name].get("expert_fingerprint"):
                raise UserError(
                    f"Domain '{domain.name}' of {self.folder} was calibrated to another expert than {domain.expert} is "
                    f"now; say where that one is with '--expert {domain.name}=MODEL'."
                )

    def check_prompts(self, domain: DomainJob) -> None:
        """Raise `UserError` where the sequences are not those of the calibration, so that its split is not known."""
        if domain.prompts.digest != self.config["domains"][domain.name].get("prompts"):
            raise UserError(
                f"The prompts of domain '{domain.name}' are not those that {self.folder} was calibrated on; give "
                f"those with '--prompts {domain.name}=FILE', or measure on others with '--held-out {domain.name}=FILE'."
            )
