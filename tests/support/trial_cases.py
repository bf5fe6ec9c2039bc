"""Create kernel trials of a toy product: right, wrong by one bit, or raising."""

import mlx.core as mx

from mlx_mtp.tuning.kernel_trials import KernelTrial

K = 16
WEIGHTS = [mx.random.normal((K,), key=mx.random.key(i)) for i in range(3)]
SHAPE = "16x16 float32"


def stock(w):
    return lambda x: [x * w, x + w]


def trial(ours=stock, rows=3, op="double", shape=SHAPE, weights=WEIGHTS, dtype=mx.float32):
    return KernelTrial(op, shape, rows, [(ours(w), stock(w)) for w in weights], K, dtype)


def off_by_one_bit(row=slice(None), when=lambda x, w: True):
    """Return the stock product with the last bit of one output changed in one row."""

    def ours(w):
        def run(x):
            a, b = stock(w)(x)
            if not when(x, w):
                return [a, b]
            bits = b.view(mx.uint32)
            bits[row, K - 1] = bits[row, K - 1] ^ 1
            return [a, bits.view(mx.float32)]

        return run

    return ours


def fails(error):
    def ours(_):
        def run(_):
            raise error

        return run

    return ours
