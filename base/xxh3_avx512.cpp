// SPDX-License-Identifier: Apache-2.0
#include "base/xxh3_wide.h"

static_assert(XXH_VECTOR == XXH_AVX512);
const torpor::Xxh3 torpor::kXxh3Avx512{torpor::hash_wide, torpor::update_wide};
