package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/iptables"
)

// A capturedQuery says what has answered a query that was sent as a client of this host sends it.
type capturedQuery struct {
	Server string `json:"server"` // the first nameserver of resolv.conf
	UID    int    `json:"uid"`    // of the socket
	By     string `json:"by"`     // agent, otherAgent or server
	ID     string `json:"id,omitempty"`
}

// What has answered a captured query.
const (
	byAgent      = "agent"      // the agent of --dns-addr
	byOtherAgent = "otherAgent" // another agent
	byServer     = "server"     // no agent
)

// capture makes the asker send queries as a client does: to the first nameserver of resolv.conf, which the rules
// redirect to the agent.
func (a *asker) capture(o *options) error {
	path := o.agent.DNS.Forward.ResolvConf
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the nameserver to ask: %w", err)
	}
	// Not Files.Read, which replaces systemd-resolved's stub, that clients ask.
	servers := resolvconf.Parse(text).Servers
	if len(servers) == 0 {
		return fmt.Errorf("%s names no nameserver, so clients ask 127.0.0.1: query that with --dns-addr", path)
	}
	if a.user, err = clientUser(&o.capture.Config); err != nil {
		return err
	}
	a.agent, a.addr = a.addr, servers[0].String()
	return nil
}

// A socketUser is the user that a socket belongs to.
type socketUser struct{ uid, gid int }

// nobody is the user of clients if this command runs as root.
const nobody = 65534

// clientUser returns a user whose queries are captured: the one of this command, or for root one without rights.
func clientUser(c *iptables.Config) (*socketUser, error) {
	passes := func(id int, lists ...[]uint32) bool {
		return slices.ContainsFunc(lists, func(ids []uint32) bool { return slices.Contains(ids, uint32(id)) }) //nolint:gosec // an id
	}
	user := &socketUser{os.Geteuid(), os.Getegid()}
	if user.uid == 0 {
		user.uid, user.gid = nobody, nobody
		for passes(user.uid, c.AgentUIDs, c.ExcludeUIDs) {
			user.uid--
		}
		for passes(user.gid, c.AgentGIDs, c.ExcludeGIDs) {
			user.gid--
		}
	}
	if passes(user.uid, c.AgentUIDs, c.ExcludeUIDs) || passes(user.gid, c.AgentGIDs, c.ExcludeGIDs) {
		return nil, fmt.Errorf("queries of this user (uid %d, gid %d) are not captured, since it is the agent's, or excluded by --capture-exclude-uid or --capture-exclude-gid: run this command as root or as another user",
			user.uid, user.gid)
	}
	return user, nil
}

// dial opens a socket of the user. The kernel takes the owner of a socket from the thread that opens it.
func (u *socketUser) dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	dialer := net.Dialer{}
	if u.uid == os.Geteuid() {
		return dialer.DialContext(ctx, network, addr)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err = errors.Join(unix.Setfsgid(u.gid), unix.Setfsuid(u.uid))
		if now, _ := unix.SetfsuidRetUid(-1); now != u.uid {
			err = fmt.Errorf("opening a socket of the user %d: CAP_SETUID is missing", u.uid)
		}
		if err == nil {
			conn, err = dialer.DialContext(ctx, network, addr)
		}
	}()
	<-done
	return conn, err
}

// findCaptured says what has answered a query.
func (a *asker) findCaptured(ctx context.Context, r *queryResult) {
	if a.user == nil {
		return
	}
	c := &capturedQuery{Server: a.addr, UID: a.user.uid, By: byServer}
	r.Captured = c
	var err error
	if c.ID, err = a.id(ctx); err != nil || r.From == nil {
		return
	}
	c.By = byOtherAgent
	direct := &asker{addr: a.agent, timeout: a.timeout}
	if id, err := direct.id(ctx); err == nil && id == c.ID {
		c.By = byAgent
	}
}

// id returns the identity of the server that answers (RFC 4892); empty if it has none.
func (a *asker) id(ctx context.Context) (string, error) {
	query := new(dns.Msg).SetQuestion("id.server.", dns.TypeTXT)
	query.Question[0].Qclass = dns.ClassCHAOS
	resp, _, err := a.exchange(ctx, query)
	if err != nil || len(resp.Answer) != 1 {
		return "", err
	}
	if txt, ok := resp.Answer[0].(*dns.TXT); ok {
		return strings.Join(txt.Txt, ""), nil
	}
	return "", nil
}

// print prints what has answered; it prints nothing for nil.
func (c *capturedQuery) print(w io.Writer) {
	if c == nil {
		return
	}
	by := map[string]string{
		byAgent:      fmt.Sprintf("this agent (%s): queries of clients reach it", c.ID),
		byOtherAgent: fmt.Sprintf("another agent of nametap (%s), not the one at --dns-addr", c.ID),
		byServer:     "another server, not an agent of nametap: queries of clients are not captured; `nametap capture check` and `nametap status` show why",
	}[c.By]
	fmt.Fprintf(w, "  captured: the query of uid %d to %s was answered by %s\n", c.UID, c.Server, by)
}
