package test

import (
	"fmt"
	"maps"
	"net"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakexds"
)

// An examined is a host that `nametap doctor` examines.
type examined struct {
	*vm
	args  []string          // of doctor
	files map[string]string // what doctor sees of the host's files, by path; a path that begins with a slash is another file
	mend  func()            // ends what is broken; nil if the test does not try that
}

// A hostCase is a host, and what doctor says of it.
type hostCase struct {
	name string
	// says is the first line of a problem, without its time; "" if doctor says nothing.
	says string
	// make starts the agent, unless the host has none, and breaks the host.
	make func(e *examined)
	// raises is the code of a problem that the agent raises before a command asks it; "" if that is not checked.
	raises string
}

// control starts another control plane for the agents of the host, at a fixed address.
func (e *examined) control(opts fakexds.Options) {
	e.tb.Helper()
	opts.Addr = controlAddr
	e.Run(func() { e.xds = fakexds.Start(e.tb, opts) })
}

// controlAddr is the address of control planes that doctor names.
const controlAddr = "127.0.0.1:15012"

// doctor runs the command as root, with the files of the host.
func (e *examined) doctor(flags ...string) result {
	e.tb.Helper()
	cmd := e.command(slices.Concat([]string{"doctor", "--status-addr", statusAddr, "--resolv-conf", e.resolvConf}, e.args, flags)...)
	cmd.SysProcAttr = nil
	if len(e.files) == 0 {
		return e.run(cmd)
	}
	return e.run(e.seeing(cmd))
}

// seeing makes a command see the files of the host.
func (e *examined) seeing(cmd *exec.Cmd) *exec.Cmd {
	path, err := exec.LookPath("unshare")
	if err != nil {
		e.tb.Fatal(err)
	}
	var script strings.Builder
	for _, at := range slices.Sorted(maps.Keys(e.files)) {
		from := e.files[at]
		if !strings.HasPrefix(from, "/") {
			from = e.write(strings.ReplaceAll(at, "/", "_"), from)
		}
		fmt.Fprintf(&script, "mount --bind '%s' '%s' && ", from, at)
	}
	cmd.Args = slices.Concat([]string{"unshare", "--mount", "sh", "-c", script.String() + `exec "$0" "$@"`, cmd.Path}, cmd.Args[1:])
	cmd.Path = path
	return cmd
}

// The parts of lines that are different each time.
var (
	numberOf = regexp.MustCompile(`\(process \d+\)`)
	duration = regexp.MustCompile(` (\d+h)?(\d+m)?\d+s\b`)
)

// first returns the first line of what doctor says, without what is different each time.
func (e *examined) first(r result) string {
	_, text, _ := strings.Cut(r.stdout, "\n\n")
	line, _, _ := strings.Cut(text, "\n")
	if strings.Contains(line, "checks passed") {
		return ""
	}
	line, _, _ = strings.Cut(line, "  since ")
	line = strings.ReplaceAll(line, e.dir, "DIR")
	return duration.ReplaceAllString(numberOf.ReplaceAllString(line, "(process N)"), " T")
}

// health is what the agent says of itself, on its private socket: a firewall may drop connections. It is "" without one.
func (e *examined) health() string {
	e.tb.Helper()
	conn, err := net.DialTimeout("unix", e.socket(), patience)
	return e.getFrom(conn, err, "/healthz/ready")
}

// asks makes a client query names until the test ends, at a number a second. It ignores the answers.
func (e *examined) asks(rate int, server string, name func(i int) string) {
	e.tb.Helper()
	e.repeats(rate, e.socket53(server), func(i int) *dns.Msg { return new(dns.Msg).SetQuestion(name(i), dns.TypeA) })
}

// repeats sends queries at a rate until the end of the case, without reading the answers.
func (e *examined) repeats(rate int, conn *dns.Conn, query func(i int) *dns.Msg) {
	e.tb.Helper()
	ended := make(chan struct{})
	var asking sync.WaitGroup
	e.tb.Cleanup(func() { close(ended); asking.Wait(); conn.Close() })
	asking.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(rate))
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ended:
				return
			case <-tick.C:
			}
			_ = conn.WriteMsg(query(i)) // the host is broken
		}
	})
}

// socket53 opens a UDP socket of a client.
func (e *examined) socket53(server string) (conn *dns.Conn) {
	e.tb.Helper()
	var err error
	e.Run(func() { conn, err = dns.Dial("udp", server) })
	if err != nil {
		e.tb.Fatal(err)
	}
	return conn
}

// numbered returns different names of different domains.
func numbered(i int) string { return fmt.Sprintf("www.example%d.org.", i) }

// becomes waits until doctor says a line first, or until it is healthy for "".
func (e *examined) becomes(line string) {
	e.tb.Helper()
	var r result
	said, again := "-", 0
	for range 240 { // seconds; the machine may be busy
		_, says, _ := strings.Cut(e.health(), "\r\n\r\n")
		if again--; says != said || again <= 0 { // a command costs much more than a request
			said, again = says, 5
			if r = e.doctor(); e.first(r) == line && (line != "" || r.code == 0) && !strings.Contains(r.stdout, "\nsuspected") {
				return
			}
		}
		time.Sleep(time.Second) //nolint:forbidigo // the host may be broken for longer than wait.Until waits
	}
	e.tb.Errorf("doctor says %q first, want %q; exit code %d:\n%s%s", e.first(r), line, r.code, r.stdout, r.stderr)
}

// examine runs a subtest for each host, all at the same time: problems are raised after 15 s. Few hosts are made at a
// time, in their order.
func examine(t *testing.T, cases []hostCase, test func(e *examined, c hostCase)) {
	t.Helper()
	turns := make(chan struct{}, 3)
	var running sync.WaitGroup
	for _, c := range cases {
		turns <- struct{}{}
		running.Go(func() {
			release := sync.OnceFunc(func() { <-turns })
			defer release()
			t.Run(c.name, func(t *testing.T) {
				e := &examined{vm: newVM(t, "nft"), files: map[string]string{}}
				e.flags = append(e.flags, "--upstream-timeout", "4s") // as by default
				c.make(e)
				release()
				test(e, c)
			})
		})
	}
	running.Wait()
}
