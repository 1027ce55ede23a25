package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Prepare()
	testscript.Main(m, map[string]func(){"nametap": func() {
		readTimeout = patience
		main()
	}})
}

// patience is how long a client of a test waits: the machine may be busy.
const patience = time.Hour

// TestScripts runs the real command. Each script has a control plane that behaves like istiod
// and a nameserver that knows example.org.
func TestScripts(t *testing.T) {
	t.Parallel()
	scripts, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, script := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(script), ".txtar"), func(t *testing.T) {
			t.Parallel()
			upstream := fakedns.Start(t, fakedns.Answer("www.example.org. 300 IN A 203.0.113.80"))
			world := &world{xds: fakexds.Start(t, fakexds.Options{}), upstream: upstream, ip: ownAddress(t)}
			testscript.Run(t, testscript.Params{
				Files: []string{script},
				Setup: world.setup,
				Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
					"push":        world.push,
					"push-bytes":  world.pushBytes,
					"ready":       world.ready,
					"get":         world.get,
					"post":        world.post,
					"asked":       world.asked,
					"nameserver":  world.nameserver,
					"until":       until(false),
					"until-fails": until(true),
					"sigterm":     sigterm,
				},
			})
		})
	}
}

// A world has the peers of the agent of one script.
type world struct {
	xds      *fakexds.Server
	upstream *fakedns.Server
	ip       string // of the agent
}

// setup sets the script's environment: XDS, UPSTREAM, the addresses DNS, STATUS and EGRESS of the agent, and more patience than
// a nameserver or an agent of the script needs.
func (w *world) setup(env *testscript.Env) error {
	run := filepath.Join(env.WorkDir, "run")
	if err := os.Mkdir(run, 0o700); err != nil {
		return err
	}
	for key, value := range map[string]string{
		"RUNTIME_DIRECTORY": run, // of the agent's private socket
		"NAMETAP_STATE_DIR": run, // the default may be that of an agent of this machine, which another user may not read
		"XDS":               w.xds.Addr(), "UPSTREAM": w.upstream.Addr.String(), "DNS": w.ip + ":25053", "STATUS": w.ip + ":25020", "EGRESS": w.ip + ":25054",
		"NAMETAP_UPSTREAM_TIMEOUT": patience.String(),
		// Otherwise the race detector delays the end of each command by a second.
		"GORACE":   "atexit_sleep_ms=0",
		"POD_NAME": "web-0", "POD_NAMESPACE": "ns1", "INSTANCE_IP": "10.1.2.3",
	} {
		env.Setenv(key, value)
	}
	return nil
}

// ownAddress returns an address of this host that no other test uses until the test ends. A listener at another port
// reserves it.
func ownAddress(tb testing.TB) string {
	tb.Helper()
	for {
		ip := fmt.Sprintf("127.%d.%d.%d", 16+rand.IntN(200), rand.IntN(256), 1+rand.IntN(250))
		reserved, err := net.Listen("tcp", ip+":25000")
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { reserved.Close() })
		return ip
	}
}

// push FILE pushes a NameTable as JSON. With an agent connected, add -wait: it
// returns when the agent has acknowledged; ! push expects a rejection.
func (w *world) push(ts *testscript.TestScript, neg bool, args []string) {
	wait := len(args) > 0 && args[0] == "-wait"
	if wait {
		args = args[1:]
	}
	if len(args) != 1 {
		ts.Fatalf("usage: push [-wait] file")
	}
	var table api.NameTable
	ts.Check(protojson.Unmarshal([]byte(ts.ReadFile(args[0])), &table))
	version := w.xds.Push(&table)
	if wait {
		w.answered(ts, version, neg)
	}
}

// push-bytes TEXT pushes TEXT in place of a NameTable.
func (w *world) pushBytes(ts *testscript.TestScript, neg bool, args []string) {
	w.answered(ts, w.xds.PushBytes([]byte(strings.Join(args, " "))), neg)
}

func (w *world) answered(ts *testscript.TestScript, version string, rejected bool) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	answers := make(chan fakexds.Request, 1)
	go func() {
		if request, err := w.xds.WaitAnswer(ctx, version); err == nil {
			answers <- request
		}
	}()
	request := wait.For(ts, "the agent answers push "+version, answers)
	if (request.Rejection() != nil) != rejected {
		ts.Fatalf("push %s: rejected with %v, want rejected: %v", version, request.Rejection(), rejected)
	}
}

// ready waits until the agent is ready; ! ready waits until it answers that it is not.
func (w *world) ready(ts *testscript.TestScript, neg bool, _ []string) {
	what := map[bool]string{false: "the agent is ready", true: "the agent is not ready"}[neg]
	wait.Until(ts, what, func() bool {
		resp, err := http.Get("http://" + ts.Getenv("STATUS") + "/healthz/ready")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return (resp.StatusCode == http.StatusOK) != neg
	})
}

// get PATH prints an endpoint of the private socket; ! get expects another status than 200.
func (w *world) get(ts *testscript.TestScript, neg bool, args []string) {
	resp, err := private(ts).Get("http://" + ts.Getenv("STATUS") + args[0])
	w.show(ts, resp, err, neg)
}

// post PATH is get with the method POST.
func (w *world) post(ts *testscript.TestScript, neg bool, args []string) {
	resp, err := private(ts).Post("http://"+ts.Getenv("STATUS")+args[0], "", nil)
	w.show(ts, resp, err, neg)
}

// private returns a client of the agent's private socket.
func private(ts *testscript.TestScript) *http.Client {
	paths := agent.SocketPaths([]string{ts.Getenv("RUNTIME_DIRECTORY")}, ts.Getenv("STATUS"))
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return agent.DialPrivate(ctx, paths)
	}}}
}

func (w *world) show(ts *testscript.TestScript, resp *http.Response, err error, neg bool) {
	ts.Check(err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	ts.Check(err)
	_, err = ts.Stdout().Write(append([]byte(resp.Status+"\n"), body...))
	ts.Check(err)
	if (resp.StatusCode == http.StatusOK) == neg {
		ts.Fatalf("%s: %s", resp.Request.URL, resp.Status)
	}
}

// asked NAME fails unless the nameserver was asked for NAME; ! asked fails if it was.
func (w *world) asked(ts *testscript.TestScript, neg bool, args []string) {
	asked := slices.ContainsFunc(w.upstream.Queries(), func(q fakedns.Query) bool { return q.Name == args[0] })
	if asked == neg {
		ts.Fatalf("the nameserver was asked for %v", w.upstream.Queries())
	}
}

// nameserver RECORD... makes the nameserver answer with these records; nameserver RCODE makes it answer every question
// with a response code, nameserver evil with texts that a terminal obeys, and nameserver silent with nothing.
func (w *world) nameserver(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: nameserver RECORD... | RCODE | evil | silent")
	}
	rcode, named := dns.StringToRcode[args[0]]
	switch {
	case args[0] == "evil":
		w.upstream.Handle(fakedns.Failure(1000, "a\x1b[31m\u202e\n  from: b\xff"))
	case args[0] == "silent":
		w.upstream.Handle(fakedns.Silence)
	case named:
		w.upstream.Handle(fakedns.Rcode(rcode))
	default:
		w.upstream.Handle(fakedns.Answer(args...))
	}
}

// until PATTERN COMMAND... runs a command until its output matches; until-fails is for a command that fails then. The
// argument LIMIT is a time that doubles with each attempt, since nobody knows how long the machine needs.
func until(fails bool) func(ts *testscript.TestScript, neg bool, args []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if neg || len(args) < 2 {
			ts.Fatalf("usage: until PATTERN COMMAND...")
		}
		pattern, limit := regexp.MustCompile(args[0]), 100*time.Millisecond
		wait.Until(ts, fmt.Sprintf("the output of %q matches %q", args[1:], args[0]), func() bool {
			with := slices.Clone(args[2:])
			if i := slices.Index(with, "LIMIT"); i >= 0 {
				with[i] = limit.String()
				limit *= 2
			}
			err := ts.Exec(args[1], with...)
			if !fails {
				ts.Check(err)
			}
			return pattern.MatchString(ts.ReadFile("stdout")+ts.ReadFile("stderr")) && (err != nil) == fails
		})
	}
}

// sigterm sends SIGTERM to every command in the background.
func sigterm(ts *testscript.TestScript, _ bool, _ []string) {
	for _, command := range ts.BackgroundCmds() {
		ts.Check(command.Process.Signal(syscall.SIGTERM))
	}
}
