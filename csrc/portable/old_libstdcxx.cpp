// Functions that headers of g++ call, but that only libstdc++ 9 to 11 or later have. They are made here from functions
// of libstdc++ 8: see QUIRE_PORTABLE. They are not visible outside of this extension.
#include <exception>
#include <new>

namespace std {

__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std

// The copy constructor and the destructor of std::exception_ptr. In libstdc++ 8 only they count references.
extern "C" void copy_exception_ptr(void* self,
                                   const void* other) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
extern "C" void destroy_exception_ptr(void* self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

// exception_ptr::_M_addref(). It makes a copy that nobody destroys.
extern "C" __attribute__((visibility("hidden"))) void add_reference(void* self) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
extern "C" void add_reference(void* self) {
  alignas(std::exception_ptr) unsigned char copy[sizeof(std::exception_ptr)];
  copy_exception_ptr(copy, self);
}

// exception_ptr::_M_release(). It destroys the pointer and leaves it empty.
extern "C" __attribute__((visibility("hidden"))) void release_reference(void* self) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
extern "C" void release_reference(void* self) {
  destroy_exception_ptr(self);
  *static_cast<void**>(self) = nullptr;
}
