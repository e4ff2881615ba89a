"""What loading models leaves in memory, kept away from Python's garbage collector.

vLLM, torch and a frontend are a million objects that live as long as the process. The requests of a busy gateway make
the collector look through all of them several times a second, which was a third of the gateway's time.
``vllm serve`` does the same once it has started; here models come and go.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect what is garbage now and let later collections look only at what is made after this.

    Call it after a model was loaded or closed. It holds up the process as one full collection does, a fraction of a
    second.
    """
    gc.unfreeze()  # the frontends that were closed meanwhile
    gc.collect()
    gc.freeze()
