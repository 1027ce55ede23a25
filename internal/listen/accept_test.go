package listen_test

import (
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/listen"
)

// TestWaiting checks that a signal is no client: for a client, a server may close another connection. R3, R23.
func TestWaiting(t *testing.T) {
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	threads, waiting := make(chan int), make(chan bool)
	go func() {
		runtime.LockOSThread()
		threads <- unix.Gettid()
		waiting <- listen.Waiting(listener, time.Minute)
	}()
	for thread := <-threads; ; {
		select {
		case got := <-waiting:
			if got {
				t.Error("a client waits")
			}
			return
		case <-time.After(time.Millisecond):
			if err := unix.Tgkill(unix.Getpid(), thread, unix.SIGURG); err != nil { // as the scheduler does
				t.Fatal(err)
			}
		}
	}
}
