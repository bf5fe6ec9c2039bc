"""Requests with pictures to a vision without a tower, and their prompts."""

import seeing
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_mtp.pictures.rows import Picture, mark_ids
from mlx_mtp.serve.chat import ChatRequest
from mlx_mtp.serve.fields import ModelInfo
from mlx_mtp.serve.messages import MessagesRequest
from mlx_mtp.serve.prompts import marks_of
from mlx_mtp.serve.responses import ResponsesRequest

APIS = {"chat": ChatRequest, "messages": MessagesRequest, "responses": ResponsesRequest}
SIDE = 8  # pixels of a row


class Eyes:
    """A vision without a tower: a row for each SIDE x SIDE pixels; `opened` lists the decoded pictures' sizes."""

    mark = seeing.PAD

    def __init__(self):
        self.opened = []

    def grid(self, height, width, most=None):
        scale = min(1, ((most or 10**9) / (height * width)) ** 0.5)
        return 1, max(1, int(height * scale) // SIDE), max(1, int(width * scale) // SIDE)

    def picture(self, image, most=None):
        self.opened.append(image.size)
        return Picture(image.digest, self.grid(*image.size, most))


def info_of(tokenizer=None, vision=None, **more):
    tokenizer = tokenizer or TokenizerWrapper(seeing.tokenizer())
    marks = marks_of(tokenizer, vision and vision.mark)
    fixed = {"positions": 10**6, "max_tokens": 8, "defaults": {}, "template": {}, "turns": True, "created": 0}
    return ModelInfo(names=("eyes",), tokenizer=tokenizer, marks=marks, vision=vision, **{**fixed, **more})


def request_of(info, api, body):
    (request,) = APIS[api](body, info).requests
    return request


def text_and_sizes(info, request):
    text = info.tokenizer.decode(mark_ids(request.prompt, seeing.PAD))
    return text, [picture.grid[1:] for picture in request.pictures]
