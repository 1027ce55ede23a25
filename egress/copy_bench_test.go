package egress

import (
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// peerAddr is the variable with the address that a process of this test connects to as the client of a stream.
const peerAddr = "EGRESS_TEST_PEER"

// streamSize is the length in bytes of the stream.
const streamSize = 2 << 30

func TestMain(m *testing.M) {
	if addr := os.Getenv(peerAddr); addr != "" {
		bePeer(addr)
		return
	}
	os.Exit(m.Run())
}

// bePeer is the client and the host of a stream, in another process than the copying one. It writes the address of
// the host to its standard output.
func bePeer(addr string) {
	host, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	if _, err := io.WriteString(os.Stdout, host.Addr().String()); err != nil {
		panic(err)
	}
	_ = os.Stdout.Close() // the parent reads to the end
	client, err := net.Dial("tcp", addr)
	if err != nil {
		panic(err)
	}
	conn, err := host.Accept()
	if err != nil {
		panic(err)
	}
	go func() {
		block := make([]byte, 1<<20)
		for left := streamSize; left > 0; left -= len(block) {
			if _, err := conn.Write(block); err != nil {
				panic(err)
			}
		}
		_ = conn.Close()
	}()
	for got, block := 0, make([]byte, 1<<20); got < streamSize; {
		n, err := client.Read(block)
		if err != nil {
			panic(err)
		}
		got += n
	}
	_ = client.Close()
}

// BenchmarkCopy copies a stream between two connections, by this package and by io.Copy, and reports the
// processor time of this process for a gigabyte.
func BenchmarkCopy(b *testing.B) {
	copiers := map[string]func(client, host *net.TCPConn){
		"own": func(client, host *net.TCPConn) {
			l, err := newLoop()
			if err != nil {
				b.Fatal(err)
			}
			defer l.end()
			c, ended := &copier{loop: l}, false
			defer c.closePipes()
			p := c.newPair(watched(b, l, client), watched(b, l, host), &counts{})
			p.done = func() { ended = true }
			p.move()
			if err := l.run(func() bool { return ended }); err != nil {
				b.Fatal(err)
			}
		},
		"io.Copy": func(client, host *net.TCPConn) {
			byIO(client, host, func(to, from *net.TCPConn) { _, _ = io.Copy(to, from) })
		},
		"io.Copy without a pipe": func(client, host *net.TCPConn) {
			byIO(client, host, func(to, from *net.TCPConn) { _, _ = io.Copy(struct{ io.Writer }{to}, struct{ io.Reader }{from}) })
		},
	}
	for _, name := range []string{"own", "io.Copy", "io.Copy without a pipe", "own", "io.Copy", "io.Copy without a pipe"} {
		b.Run(name, func(b *testing.B) {
			var used int64
			for b.Loop() {
				client, host := stream(b)
				before := processorTime(b)
				copiers[name](client, host)
				used += processorTime(b) - before
			}
			b.SetBytes(streamSize)
			b.ReportMetric(float64(used)/float64(b.N)*1e9/streamSize/1e6, "cpu-ms/GB")
		})
	}
}

// watched returns a connection as a socket of a loop, and closes it.
func watched(tb testing.TB, l *loop, conn *net.TCPConn) *socket {
	tb.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	fd := -1
	if controlErr := raw.Control(func(from uintptr) { fd, err = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0) }); controlErr != nil || err != nil {
		tb.Fatal(controlErr, err)
	}
	if err := conn.Close(); err != nil {
		tb.Fatal(err)
	}
	s, err := l.watch(fd, eventsOfConn, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// byIO copies in both directions until both have ended.
func byIO(client, host *net.TCPConn, transfer func(to, from *net.TCPConn)) {
	var running sync.WaitGroup
	for _, d := range [][2]*net.TCPConn{{client, host}, {host, client}} {
		running.Go(func() {
			transfer(d[0], d[1]) // until the client or the host closes
			_ = d[0].CloseWrite()
		})
	}
	running.Wait()
	_, _ = client.Close(), host.Close()
}

// stream returns the connections of another process.
func stream(b *testing.B) (client, host *net.TCPConn) {
	b.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer listener.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.Stderr = append(os.Environ(), peerAddr+"="+listener.Addr().String()), os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cmd.Wait() }) // its failure shows as a short stream
	addr, err := io.ReadAll(out)
	if err != nil {
		b.Fatal(err)
	}
	conn, err := listener.Accept()
	if err != nil {
		b.Fatal(err)
	}
	to, err := net.Dial("tcp", string(addr))
	if err != nil {
		b.Fatal(err)
	}
	return conn.(*net.TCPConn), to.(*net.TCPConn)
}

// processorTime returns the processor time of this process in nanoseconds.
func processorTime(b *testing.B) int64 {
	b.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return usage.Utime.Nano() + usage.Stime.Nano()
}
