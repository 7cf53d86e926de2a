// Replays recorded launches, for the sanitizers: every tensor in an allocation of its own size.
//
// The recording is a stream of int64: the number of tensors and for each its bytes and content
// (padded to 8); the number of launches and for each its kernel (8 words of text), grid, items,
// the table's tensor, and how many of its words are addresses: (word, tensor, offset) each.
#include "kernels.cpp"

#include <cstdio>
#include <fstream>

static std::ifstream input;

static long long number() {
    long long value = 0;
    input.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
}

int main(int, char** arguments) {
    input.open(arguments[1], std::ios::binary);
    std::vector<char*> tensors;
    for (long long i = number(); i > 0; --i) {
        const long long size = number();
        // malloc aligns to 16, as vectors need, and the sanitizer guards both ends.
        char* tensor = static_cast<char*>(std::malloc(size));
        tensors.push_back(tensor);
        input.read(tensor, size);
        input.ignore((8 - size % 8) % 8);
    }
    for (long long i = number(); i > 0; --i) {
        char name[64];
        input.read(name, sizeof name);
        const long long grid = number(), items = number();
        char* table = tensors[number()];
        for (long long k = number(); k > 0; --k) {
            const long long word = number(), tensor = number(), offset = number();
            reinterpret_cast<long long*>(table)[word] =
                reinterpret_cast<long long>(tensors[tensor]) + offset;
        }
        if (!input || emulate(name, 0, grid, table, items)) return 3;
    }
    for (char* tensor : tensors) std::free(tensor);
    std::puts("replayed");
}
