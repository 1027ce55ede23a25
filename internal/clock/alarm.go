package clock

import (
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An alarm calls a function, in another goroutine, when a time has passed.
type alarm interface {
	// set makes the alarm call the function once, when the time d has passed. It replaces a time that was set before.
	set(d time.Duration)
	// stop ends the alarm. It does not wait for a call that has begun.
	stop()
}

// newAlarm returns an alarm that calls ring. If kernel is true, the alarm is a timer of the kernel, unless the
// kernel refuses the timer.
func newAlarm(kernel bool, ring func()) alarm {
	if kernel {
		if a, err := newKernelAlarm(ring); err == nil {
			return a
		}
	}
	a := goAlarm{time.AfterFunc(time.Hour, ring)}
	a.timer.Stop()
	return a
}

// A goAlarm is a timer of Go.
type goAlarm struct{ timer *time.Timer }

func (a goAlarm) set(d time.Duration) { a.timer.Reset(d) }
func (a goAlarm) stop()               { a.timer.Stop() }

// A kernelAlarm is a timer of the kernel (timerfd_create(2)). It wakes an idle process once for each time that was
// set. A timer of Go wakes the process about eight times: Go waits for events with a precision of a millisecond,
// and Go's monitor, which wakes on time, checks every 20 µs until the timer has run.
type kernelAlarm struct {
	file *os.File
	fd   uintptr // the descriptor of file
}

func newKernelAlarm(ring func()) (*kernelAlarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	a := &kernelAlarm{file: os.NewFile(uintptr(fd), "timer"), fd: uintptr(fd)}
	conn, err := a.file.SyscallConn()
	if err != nil {
		_ = a.file.Close()
		return nil, err
	}
	go func() {
		for conn.Read(rung) == nil { // until stop
			ring()
		}
	}()
	return a, nil
}

// rung reports whether the time of the timer fd has passed. It makes the system call without telling Go's
// scheduler, because that would wake Go's monitor. This is safe, because reading the timer does not block.
func rung(fd uintptr) bool {
	var times uint64
	_, _, err := syscall.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&times)), unsafe.Sizeof(times))
	return err != unix.EAGAIN
}

func (a *kernelAlarm) set(d time.Duration) {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(max(d, 1).Nanoseconds())}                              // 0 would switch it off
	_, _, _ = syscall.RawSyscall6(unix.SYS_TIMERFD_SETTIME, a.fd, 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0) // fails only with wrong arguments
}

func (a *kernelAlarm) stop() { _ = a.file.Close() }
