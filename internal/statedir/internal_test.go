package statedir

import (
	"testing"

	"golang.org/x/sys/unix"
)

// C7: only the errors that mean a file system without locks permit going on without one.
func TestUnsupported(t *testing.T) {
	for err, want := range map[error]bool{
		unix.ENOSYS: true, unix.EOPNOTSUPP: true, unix.ENOLCK: true,
		unix.EWOULDBLOCK: false, unix.EIO: false, unix.EBADF: false, unix.EINTR: false,
	} {
		if got := unsupported(err); got != want {
			t.Errorf("%v: %t, want %t", err, got, want)
		}
	}
}
