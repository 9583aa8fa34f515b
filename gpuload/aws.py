"""Profiles of the AWS tools, as settings of obstore's store."""

from __future__ import annotations

import configparser
import os
from typing import Any

from gpuload.errors import PlanError

_PROFILE = (
    ("access_key_id", "aws_access_key_id", ()),
    ("secret_access_key", "aws_secret_access_key", ()),
    ("session_token", "aws_session_token", ()),
    ("region", "region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
    ("endpoint", "endpoint_url", ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")),
)
"""obstore's settings, their names in the AWS tools' files, and the environment variables that take precedence."""

_OF_BOTO3 = {"sso_session", "sso_start_url", "role_arn", "credential_process"}
"""Settings through which an AWS profile obtains keys if it has none itself."""


def aws_profile(profile: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return keys, region and endpoint of an AWS profile, if the environment has no key.

    If it has no keys of its own, ``"profile"`` is its name: boto3 can get them.
    """
    given = {name.lower().removeprefix("aws_") for name in options}
    if profile is None and ("AWS_ACCESS_KEY_ID" in os.environ or "access_key_id" in given):
        return {}
    name = profile or os.environ.get("AWS_PROFILE")
    home = os.path.join(os.path.expanduser("~"), ".aws")
    found: dict[str, str] = {}
    for variable, file, prefix in (
        ("AWS_CONFIG_FILE", "config", "profile "),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", ""),
    ):
        parser, path = configparser.RawConfigParser(), os.environ.get(variable) or os.path.join(home, file)
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
            raise PlanError(  # without the error itself, which may show a key
                f"{path}{line}: it is no {file} file of the AWS tools ({type(error).__name__}); correct it, or pass "
                "keys."
            ) from None
        section = f"{prefix}{name}" if name and name != "default" else "default"
        if parser.has_section(section):
            found |= dict(parser.items(section))
    if not found:
        if name:
            raise PlanError(
                f"profile={name!r}: neither the credentials nor the config file in {home} has it; expected a profile "
                "of the AWS tools."
            )
        return {}
    settings: dict[str, Any] = {
        ours: found[theirs]
        for ours, theirs, variables in _PROFILE
        if theirs in found and ours not in given and not any(os.environ.get(variable) for variable in variables)
    }
    if "access_key_id" not in {*settings, *given} and (name or found.keys() & _OF_BOTO3):
        settings["profile"] = name or "default"
    return settings
