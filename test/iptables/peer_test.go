package iptables_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// patience is how long a query may take, unless the test says otherwise. The machine may stand still.
const patience = 5 * time.Minute

// A peer is another process, with a separate user. It reads a command per line, and answers
// each with "ok …" or "error …".
type peer struct {
	t   *testing.T
	in  io.WriteCloser
	out *bufio.Reader
}

func startPeer(t *testing.T, ns *netns.NS) *peer {
	t.Helper()
	cmd := exec.Command("/proc/self/exe") // which another user may enter, unlike the directory of the binary
	// The race detector waits 1 s at each exit, for reports of other threads.
	cmd.Env = append(os.Environ(), envPeer+"=1", "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.Start(cmd); err != nil {
		t.Fatal(err)
	}
	p := &peer{t: t, in: in, out: bufio.NewReader(out)}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() }) // it has nothing to save
	return p
}

// do sends a command to the peer and returns the answer.
func (p *peer) do(format string, args ...any) string {
	p.t.Helper()
	what := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(p.in, what); err != nil {
		p.t.Fatal(err)
	}
	line, err := p.out.ReadString('\n')
	said, ok := strings.CutPrefix(line, "ok")
	if err != nil || !ok {
		p.t.Fatalf("%s: %s%v", what, said, err)
	}
	return strings.TrimSpace(said)
}

// runPeer reads and runs the commands.
func runPeer() {
	held := make(chan struct{})
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		said, err := peerDo(word, rest, held)
		if err != nil {
			fmt.Println("error", err)
		} else {
			fmt.Println("ok", said)
		}
	}
}

func peerDo(word, rest string, held chan struct{}) (string, error) {
	args := strings.Fields(rest)
	switch word {
	case "user": // uid gid: of every socket that is opened from now on
		uid, _ := strconv.Atoi(args[0])
		gid, _ := strconv.Atoi(args[1])
		if err := syscall.Setgroups(nil); err != nil {
			return "", err
		}
		if err := syscall.Setgid(gid); err != nil {
			return "", err
		}
		return "", syscall.Setuid(uid)
	case "ask": // network local server text
		return ask(args[0], args[1], args[2], args[3])
	case "release": // the replies that are held
		close(held)
		return "", nil
	case "serve": // mark upstream address…
		f := forwarder{mark: args[0], upstream: args[1], held: held}
		for _, address := range args[2:] {
			if err := f.serve(address); err != nil {
				return "", err
			}
		}
		return "", nil
	}
	return "", fmt.Errorf("unknown word %q", word)
}

// A query is a text that begins with the digit of its nameserver. Each process on the way
// adds its mark, so the reply shows the way: the reply to "2hello" is "2helloAU" through
// the agent and a nameserver, and "2helloU" past the agent. The reply to a query with "held" in its
// text waits for the command "release".
type forwarder struct {
	mark     string
	upstream string // "-": reply; "same": the nameserver of the digit; or an address
	held     chan struct{}
}

func (f forwarder) serve(address string) error {
	packets, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	go f.packets(packets)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go f.stream(conn)
		}
	}()
	return nil
}

func (f forwarder) packets(conn net.PacketConn) {
	buffer := make([]byte, 1500)
	for {
		n, client, err := conn.ReadFrom(buffer)
		if err != nil {
			continue // an ICMP error of a client that has ended
		}
		text := strings.TrimSpace(string(buffer[:n]))
		go func() { _, _ = conn.WriteTo([]byte(f.reply("udp", conn.LocalAddr(), text)), client) }()
	}
}

func (f forwarder) stream(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		_, _ = fmt.Fprintln(conn, f.reply("tcp", conn.LocalAddr(), lines.Text()))
		if strings.Contains(lines.Text(), "reset") {
			_ = conn.(*net.TCPConn).SetLinger(0)
			return
		}
	}
}

func (f forwarder) reply(network string, listening net.Addr, text string) string {
	text += f.mark
	if f.upstream == "-" {
		if strings.Contains(text, "held") {
			<-f.held
		}
		return text
	}
	if strings.Count(text, f.mark) > 3 {
		return text + "LOOP"
	}
	server := f.upstream
	if server == "same" {
		server = nameserver(netip.MustParseAddrPort(listening.String()).Addr().Unmap().Is4(), text[0])
	}
	reply, err := ask(network, "-", server, text)
	if err != nil {
		return text + "-FAILED:" + err.Error()
	}
	return reply
}

// nameserver returns an address in the namespace of the nameservers.
func nameserver(v4 bool, digit byte) string {
	if v4 {
		return "10.77.0." + string(digit) + ":53"
	}
	return "[fd77::" + string(digit) + "]:53"
}

// ask sends a text from a new socket and returns the reply.
func ask(network, local, server, text string) (string, error) {
	conn, err := open(network, local, server)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	return askOn(conn, text)
}

// open connects to a server, from a local TCP address unless that is "-".
func open(network, local, server string) (net.Conn, error) {
	return openWithin(patience, network, local, server)
}

// openWithin is open with another timeout.
func openWithin(timeout time.Duration, network, local, server string) (net.Conn, error) {
	d := net.Dialer{Timeout: timeout}
	if local != "-" {
		tcp, err := net.ResolveTCPAddr(network, local)
		if err != nil {
			return nil, err
		}
		d.LocalAddr = tcp
	}
	return d.DialContext(context.Background(), network, server)
}

// askOn sends a query on an existing socket, and ignores replies to other queries.
func askOn(conn net.Conn, text string) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(conn, text); err != nil {
		return "", err
	}
	buffer := make([]byte, 1500)
	for {
		n, err := conn.Read(buffer)
		if err != nil {
			return "", err
		}
		if reply := strings.ReplaceAll(string(buffer[:n]), "\n", ""); strings.HasPrefix(reply, text) {
			return reply, nil
		}
	}
}
