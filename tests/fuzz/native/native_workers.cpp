// The same as native_rows.cpp under TSAN: a decoder's workers meet at barriers only, while another thread looks on.
#include "workers.h"
