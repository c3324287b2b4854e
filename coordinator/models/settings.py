"""Section `hub` of the coordinator's settings: the source of pulled models."""

from typing import Annotated

from msgspec import Meta

from host.settings_loader import Section


class HubSettings(Section, frozen=True, kw_only=True):
    """Section `hub`: the hub from which `cluster pull` downloads models."""

    endpoint: Annotated[
        str,
        Meta(
            pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$",
            description="URL of the Hugging Face hub, or of a server with its protocol.",
        ),
    ] = "https://huggingface.co"
    token_file: Annotated[
        str,
        Meta(
            description=(
                "File with the token for gated and private repositories, readable by its owner only (mode 0600). "
                "Empty: no token."
            )
        ),
    ] = ""
