package lab

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// A Netspace is a network namespace with a thread of its own.
type Netspace struct {
	work  chan func()
	ended chan struct{}
}

// NewNetspace makes a netspace with only the loopback interface. The caller must close it,
// after the processes in it have ended.
func NewNetspace() (*Netspace, error) {
	n := &Netspace{work: make(chan func()), ended: make(chan struct{})}
	entered := make(chan error)
	go func() {
		defer close(n.ended)
		// Never unlocked, so the thread ends with this goroutine and no other goroutine
		// runs on it.
		runtime.LockOSThread()
		entered <- enterNetspace()
		for f := range n.work {
			f()
		}
	}()
	if err := <-entered; err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// enterNetspace moves the calling thread to a new namespace.
func enterNetspace() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("making a network namespace: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("setting the loopback interface up: %w", err)
	}
	return InOwnNamespace()
}

// Do calls f in the namespace. Processes that f starts and sockets that f opens are in the namespace. Goroutines that f
// starts are outside of it.
func (n *Netspace) Do(f func() error) error {
	done := make(chan error, 1)
	n.work <- func() { done <- f() }
	return <-done
}

// Close leaves the namespace, which removes it.
func (n *Netspace) Close() {
	close(n.work)
	<-n.ended
}

// InOwnNamespace returns an error if the calling thread is in the network namespace of the
// parent process, in which bench must not install rules.
func InOwnNamespace() error {
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("looking for the network namespace: %w", err)
	}
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", os.Getppid()))
	if err != nil {
		return fmt.Errorf("looking for the network namespace of the parent process: %w", err)
	}
	if own == theirs {
		return errors.New("this is not a network namespace of its own: rules would redirect the machine's DNS")
	}
	return nil
}

// InNetspace calls f in a namespace that is removed when f returns.
func InNetspace(f func() error) error {
	n, err := NewNetspace()
	if err != nil {
		return err
	}
	defer n.Close()
	return n.Do(f)
}
