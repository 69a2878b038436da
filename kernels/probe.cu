// Does this GPU run what we compile?  Asked once, before anything else is computed on it (nvfp4viz/device/probe.py).
// Integers alone, so that every device must agree: a step of the generator x -> 1664525 x + 1013904223 (mod 2^32).

extern "C" __global__ void nv_probe(const unsigned* seeds, unsigned* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 1664525u * seeds[i] + 1013904223u;
}
