"""The parser and the shortest body of each API."""

from mlx_mtp.serve.chat import ChatRequest
from mlx_mtp.serve.completions import CompletionRequest
from mlx_mtp.serve.messages import MessagesRequest
from mlx_mtp.serve.ollama import OllamaChat, OllamaGenerate
from mlx_mtp.serve.responses import ResponsesRequest

HI = [{"role": "user", "content": "hi"}]
APIS = {
    "chat": (ChatRequest, {"messages": HI}),
    "completions": (CompletionRequest, {"prompt": "hi"}),
    "responses": (ResponsesRequest, {"input": "hi"}),
    "messages": (MessagesRequest, {"messages": HI}),
    "ollama chat": (OllamaChat, {"messages": HI}),
    "ollama generate": (OllamaGenerate, {"prompt": "hi"}),
}
