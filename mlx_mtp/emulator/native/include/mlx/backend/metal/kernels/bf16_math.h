// In the place of MLX's file of this name, which builds on Metal's internals: metal_stdlib here has bfloat.
#pragma once
