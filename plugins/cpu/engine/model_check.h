#ifndef FASER_MODEL_CHECK_H_
#define FASER_MODEL_CHECK_H_

#include "faser_cpu.h"

namespace faser {

bool is_valid(const faser_model& model);

}  // namespace faser

#endif  // FASER_MODEL_CHECK_H_
