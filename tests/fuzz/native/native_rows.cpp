// Draws, traces and many tokens of one text in a decoder's loop: within its memory.
#include "workers.h"
