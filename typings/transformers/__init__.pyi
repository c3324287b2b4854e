# What Macpool uses of transformers. The package's own files import all of its models: their analysis took longer than
# that of Macpool.
from typing import Any

class PreTrainedTokenizerFast:
    backend_tokenizer: Any

class PreTrainedConfig:
    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> PreTrainedConfig: ...
