package test

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// patience is how long clients wait for what must come, also on a busy machine.
const patience = 5 * time.Minute

// dig runs dig and returns the addresses, the response code if there are none, or "no reply".
func (h *host) dig(args ...string) string {
	h.tb.Helper()
	return h.digWithin(patience, args...)
}

// digs runs dig, and reports an error unless it says what is wanted. What it says does not count if the machine stood
// still before: the agent may have given up a nameserver, or the rules may have lost their lease.
func (h *host) digs(want string, args ...string) {
	h.tb.Helper()
	var got string
	wait.Until(h.tb, "an answer that counts", func() bool {
		began := time.Now()
		got = h.dig(args...)
		return got == want || !machine.excuses(h.tb, began, time.Now())
	})
	if got != want {
		h.tb.Errorf("dig %s: %s, want %s", strings.Join(args, " "), got, want)
	}
}

// digSoon is dig for queries that may be lost, and are then repeated.
func (h *host) digSoon(args ...string) string {
	h.tb.Helper()
	return h.digWithin(3*time.Second, args...)
}

func (h *host) digWithin(limit time.Duration, args ...string) string {
	h.tb.Helper()
	const noReply = 9 // dig's exit code
	var output, errors strings.Builder
	cmd := exec.Command("dig", append([]string{"+tries=1", fmt.Sprintf("+timeout=%d", limit/time.Second)}, args...)...)
	cmd.Stdout, cmd.Stderr = &output, &errors
	err := h.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	switch {
	case err == nil:
	case cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == noReply:
		return "no reply"
	default:
		h.tb.Fatalf("%v: %v\n%s", cmd, err, &errors)
	}
	var found []string
	for line := range strings.Lines(output.String()) {
		fields := strings.Fields(line)
		if len(fields) == 5 && fields[3] == "A" {
			found = append(found, fields[4])
		}
	}
	if len(found) > 0 {
		return strings.Join(found, " ")
	}
	_, after, _ := strings.Cut(output.String(), "status: ")
	rcode, _, _ := strings.Cut(after, ",")
	return rcode
}

// client runs a program with text as its /etc/resolv.conf, in a mount namespace of its own.
func (h *host) client(text string, args ...string) string {
	h.tb.Helper()
	path := h.write("resolv.conf-"+strconv.Itoa(len(text)), text+"options timeout:30 attempts:5\n")
	script := `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	return h.Exec("unshare", append([]string{"--mount", "sh", "-c", script, path}, args...)...)
}

// askOn sends a query on a connection and returns the address in the answer.
func askOn(conn *dns.Conn, name string) (string, error) { return askWithin(patience, conn, name) }

func askWithin(limit time.Duration, conn *dns.Conn, name string) (string, error) {
	client := dns.Client{Timeout: limit}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), conn)
	if err != nil {
		return "", err
	}
	if len(reply.Answer) == 1 {
		if a, ok := reply.Answer[0].(*dns.A); ok {
			return a.A.String(), nil
		}
	}
	return "", fmt.Errorf("%s", dns.RcodeToString[reply.Rcode])
}

// askFrom sends a query from a new socket of a user, bound to an address and a port, in the
// network namespace of the caller. It does not receive replies from other addresses than
// the server's.
func askFrom(uid int, local netip.AddrPort, server, name string) (string, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// A socket belongs to the user of the thread that opens it.
	if uid != 0 {
		defer setOwner(0)
		setOwner(uid)
	}
	dialer := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(local)}
	conn, err := dialer.Dial("udp", net.JoinHostPort(server, "53"))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return askOn(&dns.Conn{Conn: conn}, name)
}

// asked queries a nameserver over UDP and TCP, each from a new socket, and checks the
// answer.
func (v *vm) asked(server, want string) {
	v.tb.Helper()
	for _, over := range []string{"+notcp", "+tcp"} {
		v.digs(want, over, "@"+server, mesh)
	}
}

// becomes waits until a query for the mesh name to a nameserver has an answer over UDP and TCP.
func (v *vm) becomes(server, want string) {
	v.tb.Helper()
	wait.Until(v.tb, "a query to "+server+" is answered with "+want, func() bool {
		return v.digSoon("+notcp", "@"+server, mesh) == want && v.digSoon("+tcp", "@"+server, mesh) == want
	})
}

// leased reports whether rules of a family capture queries now.
func (v *vm) leased(f family.Family) (alive bool) {
	v.tb.Helper()
	v.Run(func() {
		var err error
		if alive, err = iptables.Leased(f); err != nil {
			v.tb.Error(err)
		}
	})
	return alive
}

// refused queries a nameserver over UDP, and returns the error.
func (v *vm) refused(server string) (err error) {
	v.tb.Helper()
	v.Run(func() {
		var conn *dns.Conn
		if conn, err = dns.Dial("udp", net.JoinHostPort(server, "53")); err == nil {
			_, err = askWithin(10*time.Second, conn, "www.example.org")
			_ = conn.Close() // no reply is awaited
		}
	})
	return err
}

// setOwner sets the user and the group of files that the thread opens.
func setOwner(id int) {
	for _, set := range []func(int) (int, error){unix.SetfsgidRetGid, unix.SetfsuidRetUid} {
		_, _ = set(id) // these calls report no error
	}
}
