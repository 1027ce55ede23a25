package guard

import (
	"bufio"
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/testlog"
)

// A lab is the loop of a guard in a bubble of testing/synctest.
type lab struct {
	t        *testing.T
	began    time.Time
	events   chan event
	removed  []time.Duration // when rules were removed, since began
	failures atomic.Int32    // removals that are still to fail
	stop     func()
	err      chan error
}

// inLab runs a test in a bubble.
func inLab(t *testing.T, test func(l *lab)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(context.Background())
		l := &lab{t: t, began: time.Now(), events: make(chan event), stop: stop, err: make(chan error, 1)}
		s := &server{agents: make(map[net.Conn]*agent), deadline: time.Now().Add(Patience), Config: Config{
			FailOpen: true, Patience: Patience, Log: testlog.New(t).Logger(),
			Remove: func(context.Context) error {
				if l.failures.Add(-1) >= 0 {
					return errors.New("the lock is taken")
				}
				l.removed = append(l.removed, time.Since(l.began))
				return nil
			},
		}}
		go func() { l.err <- s.loop(ctx, l.events) }()
		test(l)
		stop()
		if err := <-l.err; err != nil {
			t.Error(err)
		}
	})
}

// after waits, and checks when rules were removed up to then.
func (l *lab) after(d time.Duration, want ...time.Duration) {
	l.t.Helper()
	time.Sleep(d) //nolint:forbidigo // in the bubble it takes no time
	synctest.Wait()
	if len(l.removed) != len(want) {
		l.t.Fatalf("after %v the rules were removed at %v, want %v", time.Since(l.began), l.removed, want)
	}
	for i := range want {
		if l.removed[i] != want[i] {
			l.t.Errorf("the rules were removed at %v, want %v", l.removed, want)
		}
	}
}

// An end is the end of an agent's connection.
type end struct {
	l       *lab
	conn    net.Conn // the guard's
	replies *bufio.Scanner
}

// connect connects an agent.
func (l *lab) connect() *end {
	agents, guards := net.Pipe()
	l.t.Cleanup(func() { _ = agents.Close() })
	return &end{l: l, conn: guards, replies: bufio.NewScanner(agents)}
}

// tell sends a message and returns the reply.
func (e *end) tell(p Phase, failOpen bool) string {
	e.l.t.Helper()
	namespace, err := netNS()
	if err != nil {
		e.l.t.Fatal(err)
	}
	return e.send(message{Phase: p, FailOpen: failOpen, NetNS: namespace})
}

func (e *end) send(m message) string {
	e.l.events <- event{conn: e.conn, message: m}
	e.replies.Scan()
	return e.replies.Text()
}

func (e *end) close() { e.l.events <- event{conn: e.conn, ended: true} }

const second = time.Second

// V2: the rules of an agent that does not come back are removed after Patience, once.
func TestAgentDoesNotReturn(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		a := l.connect()
		if reply := a.tell(Answering, true); reply != accepted {
			t.Fatal(reply)
		}
		l.after(time.Minute)
		a.close()
		l.after(time.Minute, time.Minute+Patience)
	})
}

// V1: the rules stay while an agent answers, ends, and the next one starts.
func TestAgentReturns(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		a := l.connect()
		a.tell(Starting, true)
		l.after(second)
		a.tell(Answering, true)
		l.after(time.Hour)
		a.tell(Ending, true)
		l.after(second)
		a.tell(Ending, true)
		l.after(second)
		a.close()
		l.after(second)
		b := l.connect()
		b.tell(Starting, true)
		l.after(second)
		b.tell(Answering, true)
		l.after(time.Hour)
	})
}

// V2: a start that hangs, before its first sign of life or after it.
func TestAgentHangs(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		l.after(second)
		a := l.connect()
		a.tell(Starting, true)
		l.after(time.Minute, second+Patience)
		a.tell(Answering, true) // goes on
		l.after(time.Minute, second+Patience)
		a.tell(Ending, true)
		l.after(time.Minute, second+Patience, second+2*time.Minute+Patience)
	})
}

// V2: an agent that dies at each start does not keep the rules, although it gives signs of life.
func TestAgentDiesAtStart(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		for range 7 {
			a := l.connect()
			a.tell(Starting, true)
			l.after(100 * time.Millisecond)
			a.close()
			l.after(100 * time.Millisecond)
		}
		a := l.connect() // at 1.4 s
		a.tell(Starting, true)
		l.after(200 * time.Millisecond)
		a.close()
		l.after(time.Minute, 1600*time.Millisecond)
	})
}

// V2: signs of life without an answer count for a time only.
func TestAgentNeverAnswers(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		a := l.connect()
		for range 14 {
			a.tell(Starting, true)
			l.after(second)
		}
		a.tell(Starting, true)
		l.after(2*second, StartTime)
	})
}

// TestRemovalIsRetried checks that a removal that fails is retried, until an agent answers.
func TestRemovalIsRetried(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		l.failures.Store(2)
		l.after(time.Minute, Patience+2*removeInterval)
		a := l.connect()
		a.tell(Answering, true)
		a.close()
		l.failures.Store(100)
		l.after(10*second, Patience+2*removeInterval)
		a = l.connect()
		a.tell(Answering, true)
		l.failures.Store(0)
		l.after(time.Minute, Patience+2*removeInterval)
	})
}

// TestFailClosed checks that the rules stay if the agent has said so last.
func TestFailClosed(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		a := l.connect()
		a.tell(Answering, true)
		a.tell(Answering, false)
		a.close()
		l.after(time.Minute)
		l.stop()
		l.after(second)
		if err := <-l.err; err != nil {
			t.Error(err)
		}
		l.err <- nil
	})
}

// V4: the guard removes the rules when it is stopped, unless an agent answers.
func TestGuardIsStopped(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) { // between two agents
		a := l.connect()
		a.tell(Answering, true)
		a.close()
		l.after(second)
		l.stop()
		l.after(0, second)
	})
	inLab(t, func(l *lab) { // the agent removes them
		l.connect().tell(Answering, true)
		l.stop()
		l.after(second)
	})
}

// V4: an agent that has removed its rules leaves nothing to do.
func TestAgentRemovesRules(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		a := l.connect()
		a.tell(Answering, true)
		a.tell(Removed, true)
		a.close()
		l.after(time.Minute)
		l.stop()
		l.after(second)
	})
}

// TestOtherNetwork checks that an agent in another network namespace is refused: the guard could
// not remove its rules.
func TestOtherNetwork(t *testing.T) {
	t.Parallel()
	inLab(t, func(l *lab) {
		reply := l.connect().send(message{Phase: Answering, FailOpen: true, NetNS: "4:1"})
		if reply == accepted {
			t.Error("accepted")
		}
		l.after(time.Minute, Patience)
	})
}
