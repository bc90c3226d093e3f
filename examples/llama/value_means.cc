#include "llama/value_means.h"

#include "formats/float16.h"

#include <algorithm>
#include <cstddef>

namespace kvtier::llama {

ValueMeans::ValueMeans(Decoder& decoder) : decoder_(decoder) {
  const ModelConfig& model = decoder.config();
  const auto layers = static_cast<std::size_t>(model.layers);
  const auto row = static_cast<std::size_t>(model.kv_heads * model.head_dim);
  sums_.assign(layers, std::vector<double>(row, 0.0));
  tokens_.assign(layers, 0);
}

void ValueMeans::add(const LayerStep& step) {
  const auto layer = static_cast<std::size_t>(step.layer);
  std::vector<double>& sums = sums_[layer];
  values_.resize(static_cast<std::size_t>(step.tokens) * sums.size());
  decoder_.compute().download(values_.data(), step.value, values_.size() * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < values_.size(); ++i) {
    sums[i % sums.size()] += static_cast<double>(formats::from_bfloat16(values_[i]));
  }
  tokens_[layer] += step.tokens;
}

Buffer ValueMeans::upload() const {
  std::vector<float> means;
  for (std::size_t layer = 0; layer < sums_.size(); ++layer) {
    const auto tokens = static_cast<double>(std::max<std::int64_t>(1, tokens_[layer]));
    for (const double sum : sums_[layer]) means.push_back(static_cast<float>(sum / tokens));
  }
  const Buffer buffer = decoder_.compute().allocate(means.size() * sizeof(float));
  decoder_.compute().upload(buffer.floats(), means.data(), means.size() * sizeof(float));
  return buffer;
}

}  // namespace kvtier::llama
