package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"time"

	"github.com/nametap/nametap/bench/agents/fleet"
)

// listings is how many clients nametap-discovery writes its list of agents to at a time.
const listings = 2

// list measures the list of agents: reads of the list without edits, one after the other; the command that prints it;
// and edits while as many clients as nametap-discovery permits do not read their lists.
func (s *stage) list(ctx context.Context, f *figures) error {
	if err := s.idle(ctx); err != nil {
		return err
	}
	before, err := s.memory()
	if err != nil {
		return err
	}
	m, err := s.meter()
	if err != nil {
		return err
	}
	var times fleet.Times
	var size int64
	for range s.repeats {
		begun := time.Now()
		if size, err = s.readList(ctx); err != nil {
			return err
		}
		times = append(times, time.Since(begun))
	}
	c, err := m.read()
	if err != nil {
		return err
	}
	f.addTimes("until the list is read", times)
	f.add("bytes of the list", float64(size))
	f.add("server's processor time for a list, ms", milliseconds(c.server)/float64(s.repeats))
	after, err := s.memory()
	if err != nil {
		return err
	}
	f.add("memory before, MiB anonymous", mebibytes(before.anonymous))
	f.add("memory after the lists, MiB anonymous", mebibytes(after.anonymous))
	if err := s.printList(ctx, f); err != nil {
		return err
	}
	return s.unreadLists(ctx, f)
}

// readList reads the list of agents, and returns its length.
func (s *stage) readList(ctx context.Context) (int64, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.servers[0].status+"/debug/agents", http.NoBody)
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	lines, size := int64(0), int64(0)
	all := bufio.NewScanner(response.Body)
	for all.Scan() {
		lines, size = lines+1, size+int64(len(all.Bytes())+1)
	}
	if err := all.Err(); err != nil || response.StatusCode != http.StatusOK {
		return 0, errors.Join(fmt.Errorf("listing agents: %s", response.Status), err)
	}
	if want := int64(s.agents) + 1; len(s.servers) == 1 && lines < want { // there may be more: streams that end
		return 0, fmt.Errorf("the list has %d lines, want %d", lines, want)
	}
	return size, nil
}

// printList measures the command.
func (s *stage) printList(ctx context.Context, f *figures) error {
	begun := time.Now()
	text, err := exec.CommandContext(ctx, fmt.Sprintf("/proc/%d/exe", s.servers[0].pid), "agents", "--http-addr", s.servers[0].status).Output()
	if err != nil {
		return fmt.Errorf("printing the list: %w", err)
	}
	f.add("the command, ms", milliseconds(time.Since(begun)))
	if want := ", behind: 0 ("; !strings.Contains(string(text), want) {
		last := strings.TrimSpace(string(text))
		return fmt.Errorf("the command prints %q, want %q", last[strings.LastIndexByte(last, '\n')+1:], want)
	}
	return nil
}

// unreadLists measures edits while clients do not read the list.
func (s *stage) unreadLists(ctx context.Context, f *figures) error {
	alone, err := s.rounds(ctx, s.agents)
	if err != nil {
		return err
	}
	f.addTimes("from the edit to the agent", alone)
	m, err := s.memory()
	if err != nil {
		return err
	}
	f.add("memory after the edits, MiB anonymous", mebibytes(m.anonymous))
	var during fleet.Times
	for range s.repeats {
		conns, err := s.stall(ctx)
		if err == nil {
			var times fleet.Times
			times, err = s.round(ctx, 0, s.agents)
			during = append(during, times...)
		}
		for _, conn := range conns {
			_ = conn.Close()
		}
		if err != nil {
			return err
		}
	}
	f.addTimes("the same while 2 clients do not read", during)
	m, err = s.memory()
	f.add("memory then, MiB anonymous", mebibytes(m.anonymous))
	return err
}

// stall opens as many lists as nametap-discovery permits, and reads only the start of each.
func (s *stage) stall(ctx context.Context) (conns []net.Conn, err error) {
	var dialer net.Dialer
	for len(conns) < listings && err == nil {
		var conn net.Conn
		if conn, err = dialer.DialContext(ctx, "tcp", s.servers[0].status); err != nil {
			return conns, err
		}
		conns = append(conns, conn)
		if _, err = io.WriteString(conn, "GET /debug/agents HTTP/1.1\r\nHost: localhost\r\n\r\n"); err == nil {
			_, err = io.ReadFull(conn, make([]byte, 16))
		}
	}
	return conns, err
}
