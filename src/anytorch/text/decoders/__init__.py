"""Language models of our own: Llama, Mistral, Qwen2 and Qwen3 as plain modules, read from Hugging Face folders."""

from anytorch.text.decoders.loading import load_decoder as load_decoder
from anytorch.text.decoders.model import Decoder as Decoder
from anytorch.text.decoders.model import KeyValues as KeyValues
from anytorch.text.decoders.rows import Rows as Rows
from anytorch.text.decoders.spec import DecoderSpec as DecoderSpec
from anytorch.text.decoders.steps import RecordedSteps as RecordedSteps
