// SPDX-License-Identifier: Apache-2.0
#include "base/xxh3_wide.h"

static_assert(XXH_VECTOR == XXH_AVX2);
const torpor::Xxh3 torpor::kXxh3Avx2{torpor::hash_wide, torpor::update_wide};
