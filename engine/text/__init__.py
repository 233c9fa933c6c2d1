"""Both sides of text: messages and prompts to ids, ids to text. No torch, no model, no state between requests.

`load_text` gives a TextModel: a Tokenizer (gguf_vocab and hf_vocab read its files), and a ChatTemplate (messages
brings OpenAI messages into shape, guard keeps users from writing control tokens). A TextStream turns one choice's
tokens into text as they come. To support another GGUF byte-level tokenizer, add its `tokenizer.ggml.pre` name to
gguf_vocab.PRE_TOKENIZERS.
"""

from engine.text.chat_template import ChatTemplate
from engine.text.model import TextModel, load_text
from engine.text.output import TextStream
from engine.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "TextModel", "TextStream", "Tokenizer", "load_text", "load_tokenizer"]
