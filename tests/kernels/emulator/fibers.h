// A block whose threads are fibers: the next runs when one waits. Fast, and always in the same
// order. Included by emulator.h.
#pragma once
}  // namespace emulator

#include <ucontext.h>

namespace emulator {

struct Block;

struct Here {
    Block* block;
    int thread;
};

inline Here current;
inline Here& here() { return current; }

struct Block {
    long long number = 0, grid = 1;
    unsigned slots[THREADS];

    void* memory(std::size_t size, std::size_t) {
        if (!memory_) {
            memory_.reset(std::aligned_alloc(64, (size + 63) / 64 * 64));
            std::memset(memory_.get(), 0xa5, size);
        }
        return memory_.get();
    }

    void wait() { wait_for(all_, THREADS); }
    void wait_warp(int warp) { wait_for(warps_[warp], WARP); }

    void run(const std::function<void()>& body) {
        body_ = &body;
        memory_.reset();
        for (int i = 0; i < THREADS; ++i) start(i);
        for (int left = THREADS; left;) {
            left = 0;
            for (int i = 0; i < THREADS; ++i) {
                if (fibers_[i].done) continue;
                ++left;
                if (fibers_[i].awaited && fibers_[i].awaited->rounds == fibers_[i].round) continue;
                current = {this, i};
                swapcontext(&main_, &fibers_[i].context);
            }
        }
    }

  private:
    struct Barrier {
        int waiting = 0;
        unsigned rounds = 0;
    };
    struct Fiber {
        ucontext_t context;
        std::unique_ptr<char[]> stack;
        Barrier* awaited;
        unsigned round;
        bool done;
    };
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    void wait_for(Barrier& barrier, int threads) {
        Fiber& fiber = fibers_[here().thread];
        fiber.round = barrier.rounds;
        if (++barrier.waiting == threads) {
            barrier.waiting = 0;
            ++barrier.rounds;
            return;
        }
        fiber.awaited = &barrier;
        swapcontext(&fiber.context, &main_);
        fiber.awaited = nullptr;
    }

    void start(int i) {
        Fiber& fiber = fibers_[i];
        if (!fiber.stack) fiber.stack.reset(new char[SIZE]);
        fiber.awaited = nullptr;
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = SIZE;
        fiber.context.uc_link = &main_;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Block::enter), 0);
    }

    static void enter() {
        Block* block = here().block;
        const int thread = here().thread;
        (*block->body_)();
        block->fibers_[thread].done = true;
    }

    static constexpr std::size_t SIZE = 64 * 1024;
    const std::function<void()>* body_ = nullptr;
    std::unique_ptr<void, Free> memory_;
    Fiber fibers_[THREADS];
    Barrier all_, warps_[THREADS / WARP];
    ucontext_t main_;
};

inline void run_grid(long long first, long long grid, const std::function<void()>& body) {
    static auto* block = new Block;
    block->grid = grid;
    for (block->number = first; block->number < grid; ++block->number) block->run(body);
}
