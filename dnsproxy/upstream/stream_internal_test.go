package upstream

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// inMemory makes a client use connections in memory to a nameserver, which answers the queries for which answers
// returns true. conn is the number of the connection, counted from 1. opened returns how many there were.
func inMemory(c *Client, answers func(query []byte, conn int) bool) (opened func() int) {
	var mu sync.Mutex
	conns := 0
	c.dialTCP = func(context.Context, string, string) (net.Conn, error) {
		near, far := net.Pipe()
		mu.Lock()
		defer mu.Unlock()
		conns++
		number := conns
		go func() {
			defer far.Close()
			for {
				var length [frameLen]byte
				if _, err := io.ReadFull(far, length[:]); err != nil {
					return
				}
				message := make([]byte, binary.BigEndian.Uint16(length[:]))
				if _, err := io.ReadFull(far, message); err != nil {
					return
				}
				if answers(message, number) {
					message[2] |= 0x80
					_, _ = far.Write(append(length[:], message...))
				}
			}
		}()
		return near, nil
	}
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return conns
	}
}

// streamGroup returns a group of one server that is asked over TCP.
func streamGroup(c *Client) *Group {
	spec, err := ParseSpec("192.0.2.53")
	if err != nil {
		panic(err)
	}
	return c.Group([]Spec{spec}, Options{UseVC: true})
}

// F15: a connection that swallows queries, such as one that a NAT has forgotten, is replaced:
// queries that were sent over it are sent again over another in time, and so are later ones.
func TestConnectionSwallows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		var dead atomic.Int64 // the last connection that swallows
		opened := inMemory(c, func(_ []byte, conn int) bool { return int64(conn) > dead.Load() })
		g := streamGroup(c)
		for round := range 3 {
			for i := range 10 {
				began := time.Now()
				_, _, err := g.Exchange(t.Context(), simQuery, UDPThenTCP)
				if took := time.Since(began); err != nil || took > time.Second {
					t.Errorf("round %d, query %d: %v after %v", round, i, err, took)
				}
			}
			dead.Store(int64(opened()))
		}
		if n := opened(); n != 3 {
			t.Errorf("%d connections, want one after each loss", n)
		}
	})
}

// F15: connections are replaced although there are as many as a server gets, and all swallow queries.
func TestAllConnectionsSwallow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		var dead atomic.Int64 // the last connection that swallows
		opened := inMemory(c, func(query []byte, conn int) bool {
			return int64(conn) > dead.Load() && string(query[12:]) == string(simQuery[12:])
		})
		g := streamGroup(c)
		var asking sync.WaitGroup
		for i := range maxStreams {
			asking.Go(func() { _, _, _ = g.Exchange(t.Context(), deadQuery(i), UDPThenTCP) })
			time.Sleep(maxLate / 2) //nolint:forbidigo // the bubble's clock
		}
		dead.Store(int64(opened()))
		if n := opened(); n != maxStreams {
			t.Errorf("%d connections", n)
		}
		began := time.Now()
		_, _, err := g.Exchange(t.Context(), simQuery, UDPThenTCP)
		if took := time.Since(began); err != nil || took > 2*time.Second {
			t.Errorf("%v after %v", err, took)
		}
		asking.Wait()
	})
}

// F15: slow names do not open more and more connections to a server, nor do they delay other
// names. A connection without queries is closed.
func TestSlowNamesOverTCP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		opened := inMemory(c, func(query []byte, _ int) bool { return string(query[12:]) == string(simQuery[12:]) })
		g := streamGroup(c)
		var asking sync.WaitGroup
		for i := range 40 {
			asking.Go(func() {
				if _, _, err := g.Exchange(t.Context(), deadQuery(i), UDPThenTCP); !errors.Is(err, ErrTimeout) {
					t.Error(err)
				}
			})
		}
		for range 200 {
			began := time.Now()
			_, _, err := g.Exchange(t.Context(), simQuery, UDPThenTCP)
			if took := time.Since(began); err != nil || took > 0 {
				t.Errorf("%v after %v", err, took)
			}
			time.Sleep(20 * time.Millisecond) //nolint:forbidigo // the bubble's clock
		}
		asking.Wait()
		if n := opened(); n > 4 {
			t.Errorf("%d connections", n)
		}
		time.Sleep(streamIdle - time.Second) //nolint:forbidigo // the bubble's clock
		if c.open.Load() == 0 {
			t.Error("the connection is closed too early")
		}
		time.Sleep(2 * time.Second) //nolint:forbidigo // the bubble's clock
		if n := c.open.Load(); n != 0 {
			t.Errorf("%d connections stay open", n)
		}
	})
}
