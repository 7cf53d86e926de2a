// Blocks whose threads are OS threads, all blocks of a grid at once. Included by emulator.h.
#pragma once

struct Block {
    long long number, grid;
    unsigned slots[THREADS];

    Block(long long number, long long grid) : number(number), grid(grid), all_(THREADS) {
        for (int i = 0; i < THREADS / WARP; ++i) {
            warps_.push_back(std::make_unique<std::barrier<>>(WARP));
        }
    }

    // Threads come here without an order between them.
    void* memory(std::size_t size, std::size_t) {
        std::call_once(once_, [&] {
            memory_.reset(std::aligned_alloc(64, (size + 63) / 64 * 64));
            std::memset(memory_.get(), 0xa5, size);
        });
        return memory_.get();
    }

    void wait() { all_.arrive_and_wait(); }
    void wait_warp(int warp) { warps_[warp]->arrive_and_wait(); }

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    std::barrier<> all_;
    std::vector<std::unique_ptr<std::barrier<>>> warps_;
    std::once_flag once_;
    std::unique_ptr<void, Free> memory_;
};

struct Here {
    Block* block;
    int thread;
};

inline thread_local Here current;
inline Here& here() { return current; }

inline void run_grid(long long first, long long grid, const std::function<void()>& body) {
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::jthread> threads;
    for (long long number = first; number < grid; ++number) {
        blocks.push_back(std::make_unique<Block>(number, grid));
        for (int i = 0; i < THREADS; ++i) {
            threads.emplace_back([&body, block = blocks.back().get(), i] {
                current = {block, i};
                body();
            });
        }
    }
}
