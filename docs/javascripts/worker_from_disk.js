// The search runs in a Worker, which browsers do not start for a page from the disk. There, a hidden frame takes its place.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })))
      this.inside.importScripts = (...urls) => Promise.all(urls.map(each => this.load(new URL(each, url).href)))
      this.ready = this.load(url)
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: done, onerror: failed })
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
