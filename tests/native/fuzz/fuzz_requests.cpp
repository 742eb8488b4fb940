// Requests of clients, as Triton hands them over: any names, types, shapes and buffers. The frame must say the same.
#include <stdexcept>
#include <string>

#include "input.h"
#include "requests.h"
#include "stub_request.h"

namespace {

std::string name_from(FuzzInput& input) {
  std::string name = input.text(input.take<uint8_t>());
  return name.substr(0, name.find('\0'));  // Triton's are C strings
}

}  // namespace

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  auto client = std::make_shared<stub::Request>();
  const std::string id = name_from(input);
  if (input.flag()) client->id = id.c_str();
  for (int i = input.in(0, 3); i > 0; --i) client->outputs.push_back(name_from(input));
  for (int i = input.in(0, 2); i > 0; --i) {
    const std::string names[] = {"error_codes", faser::kClientHeader, name_from(input)};
    client->parameters.emplace_back(names[input.in(0, 2)], name_from(input));
  }
  bool is_whole = true;
  for (int i = input.in(0, 4); i > 0; --i) {
    stub::Input tensor{name_from(input), input.take<uint8_t>(), {}, {}};
    for (int d = input.in(0, 5); d > 0; --d) tensor.shape.push_back(input.take<int64_t>());
    for (int b = input.in(0, 3); b > 0; --b) tensor.buffers.push_back(input.text(input.take<uint16_t>()));
    if (input.in(0, 15) == 0) tensor.num_missing_bytes = input.take<uint64_t>() >> 1;
    tensor.is_on_gpu = input.in(0, 15) == 0;
    is_whole &= tensor.num_missing_bytes == 0 && (!tensor.is_on_gpu || tensor.buffers.empty());
    client->inputs.push_back(std::move(tensor));
  }
  StubRequest stubbed(client);
  const faser::Parameters parameters = faser::read_parameters(stubbed.request);
  is_whole &= !parameters.has_two_clients;
  std::string frame;
  try {
    frame = faser::request_frame(7, 8, stubbed.request, parameters);
  } catch (const std::runtime_error&) {
    fuzz_expect(!is_whole, "a request that is whole is taken");
    return 0;
  }
  fuzz_expect(is_whole, "a request that is not whole is refused");
  faser::FrameReader body(frame.data(), frame.data() + frame.size());
  fuzz_expect(body.take<uint32_t>() == frame.size() - 4, "a frame's length");
  fuzz_expect(body.take<uint8_t>() == 4 && body.take<uint32_t>() == 7 && body.take<uint64_t>() == 8, "its heading");
  fuzz_expect(body.take_text() == (client->id == nullptr ? "" : client->id), "the id");
  std::string outputs;
  for (const std::string& output : client->outputs) outputs += output + "\n";
  fuzz_expect(body.take_text() == outputs, "the outputs");
  fuzz_expect(body.take<uint32_t>() == client->inputs.size(), "the number of inputs");
  for (const stub::Input& tensor : client->inputs) {
    fuzz_expect(body.take_text() == tensor.name && body.take<uint8_t>() == tensor.datatype, "an input");
    fuzz_expect(body.take<uint32_t>() == tensor.shape.size(), "its number of dimensions");
    for (const int64_t dim : tensor.shape) fuzz_expect(body.take<int64_t>() == dim, "a dimension");
    std::string bytes;
    for (const std::string& buffer : tensor.buffers) bytes += buffer;
    fuzz_expect(body.take<uint64_t>() == bytes.size(), "its number of bytes");
    fuzz_expect(std::string(body.take_bytes(bytes.size()), bytes.size()) == bytes, "its bytes");
  }
  fuzz_expect(body.take_text() == parameters.client, "the client");
  fuzz_expect(body.is_done(), "no more");
  return 0;
}
