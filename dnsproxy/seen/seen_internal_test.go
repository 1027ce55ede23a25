package seen

import (
	"encoding/binary"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// What is kept of a query does not change with the packet, and its reason is bounded.
func TestKept(t *testing.T) { // R13
	t.Parallel()
	packet := []byte("\x03www\x07example")
	q := Query{Name: wire.Name(unsafe.String(&packet[0], len(packet))), Reason: strings.Repeat("x", 1000), Request: packet, Response: packet}
	k := q.kept()
	packet[1] = 'x'
	if k.Name != "\x03www\x07example" || len(k.Reason) > maxReason+3 || !strings.HasSuffix(k.Reason, "...") || k.Request != nil || k.Response != nil {
		t.Errorf("%+v", k)
	}
}

// The last 1,000 failures are kept.
func TestRing(t *testing.T) { // R13
	t.Parallel()
	var r ring
	for id := range uint64(2*recentSize + 3) {
		r.put(&Query{id: id})
	}
	ids := map[uint64]bool{}
	for _, q := range r.all() {
		ids[q.id] = q.id >= recentSize+3
	}
	if len(ids) != recentSize || slices.Contains(slices.Collect(maps.Values(ids)), false) {
		t.Errorf("%d are kept, of them %v", len(ids), ids)
	}
}

// A reader gets queries in their order. Those for which its queue has no room are lost, and counted.
func TestQueue(t *testing.T) { // R13
	t.Parallel()
	r := New()
	reader := r.ReadOwn(All())
	defer reader.Close()
	q := Query{Client: netip.MustParseAddrPort("192.0.2.1:53"), Name: "\x01x", Source: "table"}
	for range queueSize + 7 {
		q.Type++
		r.Record(&q)
	}
	records, lost, err := reader.Next(t.Context())
	if len(records) != queueSize || lost != 7 || err != nil || records[0].Type != "A" || records[1].Type != "NS" {
		t.Errorf("%d read, %d lost, %v", len(records), lost, err)
	}
	reader.miss()
	if records, lost, err := reader.Next(t.Context()); len(records) > 0 || lost != 1 || err != nil {
		t.Errorf("%d read, %d lost, %v", len(records), lost, err)
	}
}

// openSockets are one of each kind that a client may have.
func openSockets(tb testing.TB) map[string]struct {
	q    Query
	sent netip.AddrPort
} {
	tb.Helper()
	type found = struct {
		q    Query
		sent netip.AddrPort
	}
	all := map[string]found{}
	closing := func(c interface{ Close() error }) { tb.Cleanup(func() { _ = c.Close() }) }
	add := func(kind string, local, remote net.Addr) {
		q := Query{Client: netip.MustParseAddrPort(local.String()), TCP: local.Network() == "tcp", Kind: Failure}
		all[kind] = found{q, netip.MustParseAddrPort(remote.String())}
	}
	for _, host := range []string{"127.0.0.1", "::1"} {
		server, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
		if err != nil && host == "::1" {
			continue // this host has no IPv6
		}
		if err != nil {
			tb.Fatal(err)
		}
		closing(server)
		conn, err := net.Dial("udp", server.LocalAddr().String())
		if err != nil {
			tb.Fatal(err)
		}
		closing(conn)
		add("UDP from "+host, conn.LocalAddr(), conn.RemoteAddr())
		open, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
		if err != nil {
			tb.Fatal(err)
		}
		closing(open)
		add("UDP without connect from "+host, open.LocalAddr(), server.LocalAddr())
		listener, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			tb.Fatal(err)
		}
		closing(listener)
		tcp, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			tb.Fatal(err)
		}
		closing(tcp)
		add("TCP from "+host, tcp.LocalAddr(), tcp.RemoteAddr())
	}
	return all
}

type sentTo netip.AddrPort

func (s sentTo) SentTo() (netip.AddrPort, bool) { return netip.AddrPort(s), false }

// The owner of a client's socket is found by both addresses, and by the port if the other address is not known, or
// is another one since the query was redirected.
func TestClients(t *testing.T) { // R13
	t.Parallel()
	c := newClients()
	defer c.close()
	var own uint64
	var stat syscall.Stat_t
	if root := cgroupRoot(); root != "" {
		text, err := os.ReadFile("/proc/self/cgroup")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if path, found := strings.CutPrefix(strings.TrimSpace(line), "0::"); found && syscall.Stat(filepath.Join(root, path), &stat) == nil {
				own = stat.Ino
			}
		}
	}
	elsewhere := netip.MustParseAddrPort("192.0.2.1:53")
	for kind, s := range openSockets(t) {
		for _, sent := range []netip.AddrPort{s.sent, elsewhere, {}} {
			if s.q.TCP && sent != s.sent {
				continue
			}
			c.budgets[Failure].left = time.Second
			who := c.find(&s.q, sentTo(sent))
			if !who.Known || int(who.UID) != os.Getuid() || own != 0 && who.Cgroup != own {
				t.Errorf("%s, sent to %v: %+v, want uid %d and cgroup %d", kind, sent, who, os.Getuid(), own)
			}
		}
	}
	// A client of another host that has the port of a socket here.
	wildcard, err := net.ListenPacket("udp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer wildcard.Close()
	port := netip.MustParseAddrPort(wildcard.LocalAddr().String()).Port()
	for addr, want := range map[string]bool{"127.0.0.1": true, "192.0.2.77": false} {
		q := Query{Client: netip.AddrPortFrom(netip.MustParseAddr(addr), port), Kind: Failure}
		for _, sent := range []netip.AddrPort{elsewhere, {}} {
			c.budgets[Failure].left = time.Second
			if who := c.find(&q, sentTo(sent)); who.Known != want {
				t.Errorf("%s, sent to %v: %+v", addr, sent, who)
			}
		}
	}
	// A listener that has the port of the client is not the client.
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	for _, client := range []string{"127.0.0.1:1", listener.Addr().String()} {
		unknown := Query{Client: netip.MustParseAddrPort(client), TCP: client != "127.0.0.1:1", Kind: Failure}
		c.budgets[Failure].left = time.Second
		if who := c.find(&unknown, sentTo(elsewhere)); who.Known {
			t.Errorf("%s: %+v", client, who)
		}
	}
}

// Lookups stop when their budget is used, and go on when time has passed.
func TestBudget(t *testing.T) { // R13
	t.Parallel()
	start := time.Now()
	b := budget{share: 0.01, burst: 20 * time.Millisecond}
	if !b.open(start) {
		t.Fatal("closed at first")
	}
	b.left -= 25 * time.Millisecond
	for after, want := range map[time.Duration]bool{0: false, 400 * time.Millisecond: false} {
		if got := b.open(start.Add(after)); got != want {
			t.Errorf("after %v: %v", after, got)
		}
	}
	if !b.open(start.Add(600 * time.Millisecond)) {
		t.Error("closed after 600 ms")
	}
	b.open(start.Add(time.Hour))
	if b.left != b.burst {
		t.Errorf("%v after an hour", b.left)
	}
}

// The name of a cgroup stays known after it has ended. A number without a directory is looked for once.
func TestUnits(t *testing.T) { // R13
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		id := func(path string) uint64 {
			t.Helper()
			dir := filepath.Join(root, path)
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			info, err := os.Stat(dir)
			if err != nil {
				t.Fatal(err)
			}
			return info.Sys().(*syscall.Stat_t).Ino
		}
		u := newUnits(root)
		gitea := id("system.slice/gitea.service")
		if path := u.path(&Query{Time: time.Now(), Who: Who{Cgroup: gitea}}); path != "/system.slice/gitea.service" {
			t.Error(path)
		}
		if path := u.path(&Query{Time: time.Now(), Who: Who{Cgroup: id("later.slice")}}); path != "/later.slice" {
			t.Error(path)
		}
		if err := os.RemoveAll(filepath.Join(root, "system.slice")); err != nil {
			t.Fatal(err)
		}
		if path := u.path(&Query{Time: time.Now(), Who: Who{Cgroup: 1 << 60}}); path != "" {
			t.Error(path)
		}
		if path := u.path(&Query{Time: time.Now(), Who: Who{Cgroup: gitea}}); path != "/system.slice/gitea.service" {
			t.Error(path)
		}
	})
}

func TestUnitOf(t *testing.T) { // R13
	t.Parallel()
	id := strings.Repeat("0123456789abcdef", 4)
	for path, want := range map[string]string{
		"":                                   "",
		"/":                                  "",
		"/system.slice/gitea.service":        "gitea.service",
		"/system.slice/gitea.service/worker": "gitea.service",
		"/user.slice/user-1000.slice/session-3.scope":                          "session-3.scope",
		"/user.slice/user-1000.slice/user@1000.service/app.slice/foot.service": "foot.service",
		"/system.slice/docker-" + id + ".scope":                                "docker-0123456789ab",
		"/docker/" + id:                                                        "0123456789ab",
		"/kubepods.slice/kubepods-podx.slice/cri-containerd-" + id + ".scope":  "cri-containerd-0123456789ab",
		"/lxc/web": "web",
	} {
		if got := UnitOf(path); got != want {
			t.Errorf("%s: %s, want %s", path, got, want)
		}
	}
}

// A container is selected by its name here, or by its number as its tools show it, or in full.
func TestContainers(t *testing.T) { // R13
	t.Parallel()
	id := strings.Repeat("0123456789abcdef", 4)
	for unit, want := range map[string]bool{
		"docker-0123456789ab": true, "0123456789ab": true, id: true, id[:20]: true, "docker-" + id + ".scope": true,
		"0123456789": false, "123456789abc": false, "0123456789ac": false, id + "0": false,
	} {
		var f Filter
		f.setClient(unit)
		if got := f.isUnit("/system.slice/docker-" + id + ".scope"); got != want && f.uid == nil {
			t.Errorf("%s: %v", unit, got)
		}
	}
	var f Filter
	if f.setClient("012345678901"); f.uid != nil {
		t.Error("the number of a container is taken for a uid")
	}
}

// FuzzReply: no reply of the kernel makes the parser fail.
func FuzzReply(f *testing.F) { // R13
	f.Add([]byte{}, uint32(1))
	message := make([]byte, 16+diagReply+12)
	binary.NativeEndian.PutUint32(message, uint32(len(message)))
	binary.NativeEndian.PutUint16(message[4:], diagByFamily)
	binary.NativeEndian.PutUint32(message[8:], 1)
	message[16] = 2
	binary.BigEndian.PutUint16(message[16+replyID:], 53)
	binary.NativeEndian.PutUint16(message[16+diagReply:], 12)
	binary.NativeEndian.PutUint16(message[16+diagReply+2:], attrCgroup)
	f.Add(slices.Clone(message), uint32(1))
	f.Add(append(message, message...), uint32(1))
	q := &Query{Client: netip.MustParseAddrPort("192.0.2.1:53")}
	f.Fuzz(func(t *testing.T, b []byte, seq uint32) {
		if who, _ := parseReply(b, seq, q); !who.Known && who != (owner{}) {
			t.Errorf("%+v", who)
		}
	})
}

// While all readers read failures only, ordinary queries read no clock.
func TestReadersOfFailuresCostNothing(t *testing.T) { // R13, R21
	t.Parallel()
	r := New()
	failures := r.ReadOwn(Failures())
	defer failures.Close()
	noteworthy := r.Read(&Filter{noteworthy: true})
	defer noteworthy.Close()
	if r.Start() != 0 {
		t.Error("the clock is read for readers of failures")
	}
	all := r.ReadOwn(All())
	if r.Start() == 0 {
		t.Error("the clock is not read for a reader of all queries")
	}
	if all.Close(); r.Start() != 0 {
		t.Error("the clock is read after the reader has gone")
	}
	for kind := range kinds {
		r.Record(&Query{Kind: kind, Client: netip.MustParseAddrPort("192.0.2.1:53"), Name: "\x01x"})
	}
	for reader, want := range map[*Reader]int{failures: 1, noteworthy: 2} {
		records, lost, err := reader.Next(t.Context())
		if len(records) != want || lost != 0 || err != nil {
			t.Errorf("%d records, %d lost, %v; want %d", len(records), lost, err, want)
		}
	}
}

// The queue of messages is bounded by its length and by the bytes in it. What it drops is counted, and what was read
// makes room again. Its readers do not count as clients.
func TestMessages(t *testing.T) { // R20
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := New()
		for range maxReaders {
			defer r.Read(&Filter{failures: true}).Close()
		}
		for size, room := range map[int]int{10: queueSize, 32 << 10: maxBytes / (64 << 10)} {
			lost := 0
			x := r.ReadMessages(All(), func(messages int) { lost += messages })
			q := Query{Client: netip.MustParseAddrPort("192.0.2.1:53"), Name: "\x01x", Local: func() netip.AddrPort { return netip.AddrPort{} }, Request: make([]byte, size), Response: make([]byte, size)}
			for round := range 2 {
				for i := range room + 5 {
					q.Request[0], q.Response[0] = byte(i), byte(i+1)
					r.Record(&q)
				}
				if want := 10 * (round + 1); lost != want {
					t.Errorf("%d messages of %d bytes are lost, want %d", lost, size, want)
				}
				records, _, err := x.Next(t.Context())
				if len(records) != room || err != nil {
					t.Fatalf("%d records, %v", len(records), err)
				}
				for i, got := range records {
					if got.Request[0] != byte(i) || got.Response[0] != byte(i+1) || len(got.Request) != size || got.Messages() != 2 {
						t.Fatalf("%+v", got)
					}
				}
			}
			q.Response = nil
			r.Record(&q)
			if records, _, err := x.Next(t.Context()); len(records) != 1 || records[0].Messages() != 1 || err != nil {
				t.Errorf("a query without a response: %+v, %v", records, err)
			}
			r.Record(&q)
			if x.Close(); lost != 21 {
				t.Errorf("%d messages are lost after the end, want 21", lost)
			}
		}
	})
}
