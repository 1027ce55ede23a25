package nds

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"
)

// diskTimeout is how long a caller waits for a file.
const diskTimeout = 2 * time.Second

// errNoAnswer is the error of a read that takes longer than diskTimeout.
var errNoAnswer = fmt.Errorf("the disk has not answered for %v", diskTimeout)

// A disk reads files on disks that may not answer, such as a network file system whose server is away. If a disk does
// not answer, the caller gets an error, and one goroutine for each file goes on waiting.
type disk struct {
	mu    sync.Mutex
	reads map[string]*read // the reads that have not ended
}

// A read is one read of a file. value and err are set when done is closed.
type read struct {
	began time.Time
	done  chan struct{}
	value any
	err   error
}

func newDisk() *disk { return &disk{reads: make(map[string]*read)} }

// read returns the content of the file at path.
func (d *disk) read(path string) ([]byte, error) {
	data, err := awaitDisk(d, path, func() ([]byte, error) { return os.ReadFile(path) })
	if errors.Is(err, errNoAnswer) {
		err = &fs.PathError{Op: "read", Path: path, Err: errNoAnswer}
	}
	return data, err
}

// awaitDisk returns the result of work, which reads files. If a call with the same name has not ended, it returns the
// result of that call. The error is errNoAnswer if there is no result within diskTimeout after the start of the call.
func awaitDisk[T any](d *disk, name string, work func() (T, error)) (T, error) {
	d.mu.Lock()
	r := d.reads[name]
	if r == nil {
		r = &read{began: time.Now(), done: make(chan struct{})}
		d.reads[name] = r
		go func() {
			defer close(r.done)
			r.value, r.err = work()
			d.mu.Lock()
			defer d.mu.Unlock()
			delete(d.reads, name)
		}()
	}
	d.mu.Unlock()
	timer := time.NewTimer(time.Until(r.began.Add(diskTimeout)))
	defer timer.Stop()
	select {
	case <-r.done:
		value, _ := r.value.(T) // work has returned a T
		return value, r.err
	case <-timer.C:
		var none T
		return none, errNoAnswer
	}
}
