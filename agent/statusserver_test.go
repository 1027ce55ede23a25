package agent_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// status returns the agent's status.
func (r *running) status(t *testing.T) agent.Status {
	t.Helper()
	_, body := r.get(t, "/debug/status")
	var status agent.Status
	if err := json.Unmarshal([]byte(body), &status); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return status
}

// rareAddr is an address at which a port that is closed is hardly taken by another program.
const rareAddr = "127.77.53.99:0"

// unservedOf returns the addresses that an agent cannot open, as far as it knows.
func unservedOf(status agent.Status) (texts []string) {
	for _, c := range status.Conditions {
		for _, p := range slices.Concat(c.Problems, c.Suspected) {
			if c.Code == "address_taken" {
				texts = append(texts, p.Evidence)
			}
		}
	}
	return texts
}

// TestPortsTaken checks that an agent answers DNS while other programs have the ports of its status
// and for VIPs, says so, and opens them when they are free. R3.
func TestPortsTaken(t *testing.T) {
	t.Parallel()
	var taken [2]net.Listener
	for i := range taken {
		var err error
		if taken[i], err = net.Listen("tcp", rareAddr); err != nil {
			t.Fatal(err)
		}
		defer taken[i].Close()
	}
	control := fakexds.Start(t, fakexds.Options{})
	control.Push(webTable())
	cfg := config(t, control.Addr())
	carried := egress.DefaultConfig()
	cfg.StatusAddr, carried.Addr, cfg.Egress = taken[0].Addr().String(), taken[1].Addr().String(), &carried
	a := start(t, cfg)
	a.await(t, true)
	status := a.status(t)
	unserved := unservedOf(status)
	if !status.Ready || len(unserved) != 2 {
		t.Errorf("ready %v, not served: %q", status.Ready, unserved)
	}
	for _, listener := range taken {
		if !slices.ContainsFunc(unserved, func(text string) bool {
			return strings.Contains(text, listener.Addr().String()) && strings.Contains(text, "address already in use")
		}) {
			t.Errorf("not served: %q, want %s", unserved, listener.Addr())
		}
	}
	if _, body := a.get(t, "/metrics"); !strings.Contains(body, "\nnametap_unserved_addresses 2\n") {
		t.Error("the metric does not count both")
	}
	for _, listener := range taken {
		if err := listener.Close(); err != nil {
			t.Fatal(err)
		}
	}
	wait.Until(t, "both are served", func() bool { return unservedOf(a.status(t)) == nil })
	if code, body := get(t, http.DefaultClient, cfg.StatusAddr, "/healthz/ready"); code != http.StatusOK {
		t.Errorf("ready: %d %s", code, body)
	}
	conn, err := net.Dial("tcp", carried.Addr)
	switch {
	case errors.Is(err, syscall.ECONNRESET): // accepted, and reset at once, because it is not to a VIP
	case err != nil:
		t.Fatal(err)
	default:
		_ = conn.Close()
	}
}

// TestWrongStatusAddress checks that an address that cannot become right ends the agent. R3.
func TestWrongStatusAddress(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{"192.0.2.1:15020", "nowhere", "127.0.0.1:many"} {
		cfg := config(t, "127.0.0.1:1")
		cfg.StatusAddr = addr
		if _, err := agent.New(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "status-addr \""+addr+"\"") {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

// TestPrivateEndpoints checks that the status address refuses what is private, and says where it is.
// R9.
func TestPrivateEndpoints(t *testing.T) {
	t.Parallel()
	control := fakexds.Start(t, fakexds.Options{})
	cfg := config(t, control.Addr())
	a := start(t, cfg)
	a.await(t, false)
	socket := agent.SocketPaths(cfg.SocketDirs, a.StatusAddr())[0]
	for _, request := range []string{
		"GET /debug/ndsz", "GET /debug/explain?name=web", "GET /debug/cache", "GET /debug/tail", "GET /debug/status", "POST /cache/flush", "POST /drain", "POST /quitquitquit",
	} {
		method, path, _ := strings.Cut(request, " ")
		asked, err := http.NewRequest(method, "http://"+a.StatusAddr()+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(asked)
		if err != nil {
			t.Fatal(err)
		}
		line, _ := bufio.NewReader(resp.Body).ReadString('\n')
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden || !strings.Contains(line, socket) {
			t.Errorf("%s: %s: %s", request, resp.Status, line)
		}
	}
	for _, path := range []string{"/healthz/live", "/metrics", "/stats/prometheus"} {
		wait.Until(t, path+" is served", func() bool { // on a busy machine, a probe of a listener may have no answer in time
			code, _ := get(t, http.DefaultClient, a.StatusAddr(), path)
			return code == http.StatusOK
		})
	}
	if code, _ := get(t, http.DefaultClient, a.StatusAddr(), "/"); code != http.StatusNotFound {
		t.Errorf("/: %d", code)
	}
}

// TestPrivateSocketLeft checks that an agent replaces the socket of one that was killed, and leaves the
// socket of one that runs. R9.
func TestPrivateSocketLeft(t *testing.T) {
	t.Parallel()
	control := fakexds.Start(t, fakexds.Options{})
	cfg := config(t, control.Addr())
	listener, err := net.Listen("tcp", rareAddr)
	if err != nil {
		t.Fatal(err)
	}
	cfg.StatusAddr = listener.Addr().String() // is free until the agent opens it
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	path := agent.SocketPaths(cfg.SocketDirs, cfg.StatusAddr)[0]
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	if err := left.Close(); err != nil {
		t.Fatal(err)
	}
	first := start(t, cfg)
	first.await(t, false)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("other users may use the socket: %v, %v", info, err)
	}
	if code, _ := first.get(t, "/debug/status"); code != http.StatusOK {
		t.Errorf("status: %d", code)
	}
	second := start(t, cfg) // its status address is taken, too
	second.await(t, false)
	if got := first.status(t); got.DNS[0] != first.Proxy().Addrs()[0] || unservedOf(got) != nil {
		t.Errorf("another agent answers: %+v", got)
	}
	first.end()
	first.wait(t)
	wait.Until(t, "the second agent has the socket", func() bool {
		resp, err := second.private.Get("http://agent/debug/status")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		var got agent.Status
		return json.NewDecoder(resp.Body).Decode(&got) == nil && got.DNS[0] == second.Proxy().Addrs()[0]
	})
}

// TestDumps checks that clients which do not read the table hold two places, that others get an error meanwhile, and
// that the table is complete. R9, R5.
func TestDumps(t *testing.T) {
	t.Parallel()
	const many = 4000 // more than the kernel keeps for a client that does not read
	large := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
	for i := range many {
		large.Table[fmt.Sprintf("svc-%d.shop.svc.cluster.local", i)] = &api.NameTable_NameInfo{
			Ips: []string{fmt.Sprintf("10.0.%d.%d", i/256, i%256)}, Registry: "Kubernetes", Shortname: fmt.Sprintf("svc-%d", i), Namespace: "shop",
		}
	}
	control := fakexds.Start(t, fakexds.Options{})
	control.Push(large)
	cfg := config(t, control.Addr())
	a := start(t, cfg)
	a.await(t, true)
	wait.Until(t, "all hosts are known", func() bool { return a.Proxy().Table().Len() == many })
	want := &api.NameTable{Table: maps.Collect(a.Proxy().Table().Infos)}
	var held []net.Conn
	hold := func() { // a place, by a client that does not read
		conn, err := agent.DialPrivate(t.Context(), agent.SocketPaths(cfg.SocketDirs, a.StatusAddr()))
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
		if _, err := fmt.Fprint(conn, "GET /debug/ndsz HTTP/1.1\r\nHost: agent\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"/debug/ndsz", "/debug/cache"} {
		wait.Until(t, path+" is refused", func() bool {
			resp, err := a.private.Get("http://agent" + path)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if resp.StatusCode == http.StatusOK { // on a busy machine, after previous clients were disconnected
				hold()
				return false
			}
			return resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") == "5"
		})
	}
	for _, conn := range held {
		_ = conn.Close()
	}
	var body string
	wait.Until(t, "the table is served again", func() bool {
		var code int
		code, body = a.get(t, "/debug/ndsz")
		return code == http.StatusOK
	})
	var got api.NameTable
	if err := protojson.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(want, &got) {
		t.Errorf("the table has %d entries, want the %d of the agent's", len(got.GetTable()), len(want.GetTable()))
	}
}
