"""Requests with a picture whose preparation is held or fails, while another answer runs in the same server."""

import threading
import time

from picture_requests import PATHS, body_of, noise

from mlx_mtp.pictures.image import open_image
from mlx_mtp.serve.job import DecodeRequest, Job, RequestFailed


def asked_beside_another(client, patch, **more):
    """Ask about a picture whose preparation waits until another answer has sent three more events.

    Return whether they came, the events of the other answer until then and its failure, if it failed later, and the
    response. more: of the request.
    """
    engine, events, sent, advanced, seen = client.service.engine, [], threading.Event(), [], []
    pixels = engine.served.model.vision._pixels
    patches = pixels.patches

    def held(*args):
        advanced.append(all(sent.clear() or sent.wait(5) for _ in range(3)))
        seen.extend(events)
        return patches(*args)

    def take(event):
        if not advanced:
            time.sleep(0.01)  # the request may reach its preparation late: the other answer must not end before
        events.append(event)
        sent.set()

    patch.setattr(pixels, "patches", held)
    stops = dict.fromkeys(engine.served.tokenizer.eos_token_ids, -100.0)
    prompt = engine.served.tokenizer.encode("Write.")
    job = Job(DecodeRequest(prompt, max_tokens=3000, penalties={"logit_bias": stops}), take)
    engine.submit([job])
    try:
        response = client.post(PATHS["chat"], json={**body_of("chat", noise(41), "What?"), "temperature": 0, **more})
        return advanced, seen + [event for event in events if isinstance(event, RequestFailed)], response
    finally:
        job.cancelled = True
        patch.setattr(pixels, "patches", patches)


def failures(client, patch):
    """Return the status and message of two requests whose preparation raises a RuntimeError, and a ValueError."""
    found, pixels = [], client.service.engine.served.model.vision._pixels
    for seed, error in ((42, RuntimeError("lost")), (43, ValueError("damaged"))):
        with patch.context() as failing:
            failing.setattr(pixels, "patches", lambda *_, error=error: _raise(error))
            response = client.post(PATHS["chat"], json=body_of("chat", noise(seed), "What?"))
            found.append([response.status_code, response.json()["error"]["message"]])
    return found


def _raise(error):
    raise error


def cancelled_while_held(client, patch):
    """Cancel a request while its picture is prepared; return whether it ended before the preparation did."""
    engine, begun, go = client.service.engine, threading.Event(), threading.Event()
    vision = engine.served.model.vision
    patches = vision._pixels.patches
    with patch.context() as holding:
        holding.setattr(vision._pixels, "patches", lambda *args: begun.set() or (go.wait(5) and patches(*args)))
        picture = vision.picture(open_image(noise(44)))
        job = Job(DecodeRequest([5, *picture.tokens, 6], pictures=(picture,)), lambda event: None)
        engine.submit([job])
        assert begun.wait(5)
        job.cancelled, end = True, time.monotonic() + 60
        while not job.finished and time.monotonic() < end:
            time.sleep(0.001)
        ended, _ = job.finished, go.set()
    return ended
